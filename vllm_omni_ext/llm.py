"""`OmniLLM`: vLLM's offline `LLM` for multi-stage models. `LLM(model, omni=True)` creates one."""

from __future__ import annotations

import asyncio
import atexit
import inspect
import itertools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, Future, wait
from dataclasses import replace
from functools import partial, wraps
from socket import gethostname
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

from tqdm import tqdm
from vllm.entrypoints.llm import LLM
from vllm.exceptions import VLLMError
from vllm.inputs import PromptType
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.renderers.chat_utils import load_chat_template
from vllm.renderers.inputs.preprocess import conversation_to_seq, prompt_to_seq
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.usage.usage_lib import UsageContext

from vllm_omni_ext.compat import activate
from vllm_omni_ext.engine.replica_identity import ReplicaIdentity
from vllm_omni_ext.errors import ConfigError, OmniError, RequestError, RequestFailed, StageUnavailable
from vllm_omni_ext.llm_arguments import Keywords
from vllm_omni_ext.modalities.base import OutputChunk
from vllm_omni_ext.modalities.chunks import TextChunk
from vllm_omni_ext.modalities.registry import CORE, modalities_of
from vllm_omni_ext.plugins.registry import family_chat_template, family_of
from vllm_omni_ext.plugins.runtime import RequestOptions
from vllm_omni_ext.plugins.spec import SAMPLING_PARAMS
from vllm_omni_ext.runtime.client.calls import TargetedLLM, Targets
from vllm_omni_ext.serving import sound_files
from vllm_omni_ext.serving.answers import TextOutputs
from vllm_omni_ext.serving.options import RequestFields, from_keywords, stage_params

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image
    from vllm.lora.request import LoRARequest

    from vllm_omni_ext.ids import ReplicaId
    from vllm_omni_ext.omni import AsyncOmni
    from vllm_omni_ext.runtime.client.replica_connections import ReplicaConnections, ReplicaInfo
    from vllm_omni_ext.runtime.launch.launcher import Deployment
    from vllm_omni_ext.topology.plan import StagePlan

MEDIA = ("image", "audio", "video")
"""Keys of a prompt that are moved into its `multi_modal_data`."""

CLOSED = "the LLM is closed"
CLOSE_S = 5.0
"""Seconds after the shutdown of the engine until `OmniLLM.close` cancels the calls that are still in progress."""

Sampling: TypeAlias = SamplingParams | Mapping[str, Any]
Adapters: TypeAlias = "LoRARequest | Sequence[LoRARequest | None] | None"


class OmniRequestOutput(RequestOutput):
    """A vLLM `RequestOutput` with the outputs of all modalities.

    The attributes from `audio` to `latents` are assembled from the chunks in `outputs_by_modality`.

    Attributes:
        outputs_by_modality: all chunks (`modalities.base.OutputChunk`) by name of the modality, in order. Text of the
            frontend is not among them, but in `outputs`.
        audio: float32 [samples] in [-1, 1], mono; None if no sound was requested or produced.
        sample_rate: Hz; None without sound.
        frames: codec frames, int64 [frames, code groups]; None without sound, or if the model has none.
        note: the reason that there is no sound although it was requested.
        images: PIL images.
        latents: float32 arrays, the model's latents of the pictures, if requested.
        error: the error with which this prompt failed; None if it did not. If it is set, `outputs` is one empty
            completion with finish_reason "error".
    """

    outputs_by_modality: Mapping[str, Sequence[OutputChunk]] = MappingProxyType({})
    audio: np.ndarray[Any, Any] | None = None
    sample_rate: int | None = None
    frames: np.ndarray[Any, Any] | None = None
    note: str | None = None
    images: Sequence[Image] = ()
    latents: Sequence[np.ndarray[Any, Any]] = ()
    error: OmniError | None = None


def _offline(name: str) -> Any:
    """Return a blocking method that runs the coroutine method `name` of `TargetedLLM` in `OmniLLM`'s event loop."""

    @wraps(getattr(TargetedLLM, name))
    def method(self: TargetedOfflineLLM, *args: Any, **keywords: Any) -> Any:
        return self._run(getattr(self._omni, name)(*args, **keywords))

    return method


class TargetedOfflineLLM(LLM):
    """vLLM's `LLM`, whose methods that call engines, e.g. `collective_rpc`, also take `targets` and `timeout_s`.

    `targets` are names of stages and replicas to call; see `runtime.client.calls.TargetedLLM`.
    """

    _omni: AsyncOmni

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        raise NotImplementedError

    collective_rpc = _offline("collective_rpc")
    sleep = _offline("sleep")
    wake_up = _offline("wake_up")
    is_sleeping = _offline("is_sleeping")
    release_kv_cache_memory = _offline("release_kv_cache_memory")
    reset_prefix_cache = _offline("reset_prefix_cache")
    reset_mm_cache = _offline("reset_mm_cache")
    reset_encoder_cache = _offline("reset_encoder_cache")
    start_profile = _offline("start_profile")
    stop_profile = _offline("stop_profile")
    add_lora = _offline("add_lora")
    remove_lora = _offline("remove_lora")
    list_loras = _offline("list_loras")
    pin_lora = _offline("pin_lora")

    def apply_model(self, func: Callable[[Any], Any], *, targets: Targets | None = None, **deadline: Any) -> Any:
        """Run a function on the model in every worker of the frontend, or of the stages and replicas in `targets`."""
        return self.collective_rpc("apply_model", args=(func,), targets=targets, **deadline)


class OmniLLM(TargetedOfflineLLM):
    """Starts the stages of a model as processes and runs requests for this Python program.

    `close()` (or leaving a `with` block) ends the processes.

    Args:
        model: directory or hub id.
        chat_template: as the flag `--chat-template` of `vllm serve`; None: the template of the model family, or of the
            checkpoint if the family has none.
        stage_config: as the flag `--stage-config`.
        stage_overrides: as the flag `--stage-overrides`, e.g. {"talker": {"replicas": 2}}.
        async_chunk: as the flag `--async-chunk`.
        kwargs: `EngineArgs` fields for the frontend, as for `LLM`; and other keys of a stage config without their group
            (e.g. `startup_timeout_s`).

    Raises:
        ConfigError: the arguments or the model's config are wrong; nothing was started.
        StartFailed: a stage failed to start.
    """

    def __init__(self, model: str, *, chat_template: str | None = None, **kwargs: Any) -> None:
        activate()
        from vllm_omni_ext.cli.settings import from_kwargs
        from vllm_omni_ext.runtime.launch.launcher import Deployment
        from vllm_omni_ext.runtime.launch.progress import spinner
        from vllm_omni_ext.runtime.supervise.process_watcher import ReplicaSupervisor

        plan = from_kwargs(model, **kwargs)
        family = family_of(plan.family)
        try:
            self.chat_template = load_chat_template(chat_template or family_chat_template(family))
        except (OSError, ValueError, VLLMError) as err:
            raise ConfigError(f"chat_template: {' '.join(str(err).split())}") from err
        identity = partial(_identity, ports=plan.config.cluster.ports)
        self._deployment = Deployment(plan, clients=1, usage=UsageContext.LLM_CLASS, identity_of=identity)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._calls: set[Future[Any]] = set()
        """Coroutines in progress that threads of the program have started; `_lock` is held while one is added."""
        self._replica_supervisor: ReplicaSupervisor | None = None
        self._deployment.__enter__()
        try:
            with spinner("loading") as show, self._deployment.progress.shown(show):
                self._deployment.wait()
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=_run_loop, args=(self._loop,), name="omni-loop", daemon=True)
            self._thread.start()
            log_stats = not plan.frontend().engine_args["disable_log_stats"]
            self._omni = self._run(self._connect(log_stats=log_stats))
            self._replica_supervisor = ReplicaSupervisor(
                self._deployment,
                LocalListener(self._deployment, self._omni.replica_connections),
                host=gethostname(),
                tell=log.warning,
            )
            self._replica_supervisor.watch_replicas()
        except BaseException:
            self.close()
            raise
        self._end_with_program()
        self.plan = plan
        self._modalities = modalities_of(family)
        self.model_config = self._omni.model_config
        self.renderer = self._omni.renderer
        self.input_processor = self._omni.input_processor
        self.runner_type = self.model_config.runner_type
        self.default_sampling_params: dict[str, Any] | None = None
        self._numbers = itertools.count()

    @classmethod
    def from_engine_args(cls, engine_args: Any) -> OmniLLM:
        """Raise ConfigError: an `EngineArgs` does not say which of its fields override those of a stage config."""
        raise ConfigError(
            f"from_engine_args: an EngineArgs does not say which of its fields are set; write "
            f"LLM({engine_args.model!r}, omni=True, ...) with these as keywords"
        )

    def _end_with_program(self) -> None:
        """Make the replicas' processes end when this object is garbage collected, and when the program ends.

        At the end of the program, an exit hook of `multiprocessing` kills the processes. Exit hooks run in the reverse
        order of their registration. So this method registers a hook, after that of `multiprocessing`; the hook of
        `weakref.finalize` may have been registered earlier.
        """
        end = weakref.finalize(self, _end, os.getpid(), self._deployment, self._replica_supervisor)
        atexit.register(end)
        self._finalizer = weakref.finalize(self, atexit.unregister, end)

    async def _connect(self, *, log_stats: bool) -> Any:
        from vllm_omni_ext.omni import AsyncOmni

        return AsyncOmni(self._deployment.connections(0), log_stats=log_stats)

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self._start(coroutine).result()

    def _start(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Start a coroutine in the event loop. Raises StageUnavailable: `close` was called."""
        with self._lock:
            if self._loop is None:
                coroutine.close()
                raise StageUnavailable(CLOSED)
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
            self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        return future

    # -- requests -----------------------------------------------------------------------------------------------

    def generate(  # type: ignore[override]
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: Sampling | Sequence[Sampling] | None = None,
        *,
        modalities: Sequence[str] | None = None,
        chunks: Mapping[str, Any] | None = None,
        use_tqdm: bool | Callable[..., tqdm[Any]] = True,
        lora_request: Adapters = None,
        priority: int | Sequence[int] | None = None,
        raise_on_error: bool = False,
        **more: Any,
    ) -> list[OmniRequestOutput]:
        """Return one output for each prompt, in order. The output of a failed prompt has `error` set.

        If prompts failed, one line is logged after all prompts: the number of failures, and the first error.

        Args:
            prompts: as for `LLM.generate`. In a dict, `image`, `audio` and `video` are short for entries of
                `multi_modal_data`.
            sampling_params: for the frontend, or by stage name, e.g. {"thinker": ..., "talker": ...}; one for all
                prompts or a list with one each. A stage's parameters are an object of their type, or a dict of the
                values that differ from the configured ones.
            modalities: modalities of the answer, e.g. ["text", "audio"]; None: the model's default.
            chunks: changes to the stage config's key `chunks`, the sizes of messages between stages, for these prompts.
            lora_request: adapter of the frontend; one for all prompts or a list with one each.
            priority: for the frontend's scheduler, lowest first; one for all prompts or a list with one each.
            raise_on_error: raise RequestFailed after all prompts if some of them failed.
            more: request fields of the model (e.g. `voice`); a stage's name with its parameters, e.g.
                talker={"temperature": 0}; `seed` for all stages; `temperature`, `max_tokens`, ... of the frontend; and
                `tokenization_kwargs`, `mm_processor_kwargs` as for `LLM.generate`.

        Raises:
            TypeError: a keyword is unknown, or a stage has parameters in `sampling_params` and as keywords.
            RequestError: the modalities, a field, a stage's parameters or the chunks are wrong.
            RequestFailed: prompts failed, and `raise_on_error` is set.
            StageUnavailable: another thread has called `close`.
        """
        keywords, options = self._arguments(self.generate, self._preprocess_cmpl_one, modalities, chunks, more)
        renders = [
            partial(self._preprocess_cmpl_one, _with_media(prompt), **keywords.rendering)
            for prompt in prompt_to_seq(prompts)
        ]
        stock = {"lora_request": lora_request, "priority": priority}
        return self._answer(renders, sampling_params, keywords, options, stock, use_tqdm, raise_on_error)

    def chat(  # type: ignore[override]
        self,
        messages: Any,
        sampling_params: Sampling | Sequence[Sampling] | None = None,
        use_tqdm: bool | Callable[..., tqdm[Any]] = True,
        *,
        modalities: Sequence[str] | None = None,
        chunks: Mapping[str, Any] | None = None,
        lora_request: Adapters = None,
        priority: int | Sequence[int] | None = None,
        raise_on_error: bool = False,
        **more: Any,
    ) -> list[OmniRequestOutput]:
        """Return one output for each conversation, as `generate` does.

        Args:
            messages: one conversation, or a list of them, as for `LLM.chat`.
            more: as for `generate`, and `chat_template`, `add_generation_prompt`, `tools`, `mm_processor_kwargs`, ...
                as for `LLM.chat`.
        """
        keywords, options = self._arguments(self.chat, self._preprocess_chat_one, modalities, chunks, more)
        renders = [
            partial(self._preprocess_chat_one, each, **keywords.rendering) for each in conversation_to_seq(messages)
        ]
        stock = {"lora_request": lora_request, "priority": priority}
        with sound_files.install():
            return self._answer(renders, sampling_params, keywords, options, stock, use_tqdm, raise_on_error)

    def _arguments(
        self,
        call: Callable[..., Any],
        render: Callable[..., Any],
        modalities: Sequence[str] | None,
        chunks: Mapping[str, Any] | None,
        more: Mapping[str, Any],
    ) -> tuple[Keywords, RequestOptions]:
        """Return the sorted keywords of a call of `generate` or `chat`, and the checked options of its requests.

        Args:
            call: the bound method `generate` or `chat`.
            render: vLLM's method that renders one prompt.
            more: the keywords for which the method has no parameter.
        """
        runtime = self._omni.runtime
        known = [name for name in inspect.signature(call).parameters if name != "more"]
        names = RequestFields(runtime.fields).names
        keywords = Keywords(call.__name__, more, self.plan, fields=names, render=render, known=known)
        options = from_keywords(
            runtime,
            self._omni.capabilities,
            self.plan.chunks,
            modalities=modalities,
            chunks=chunks,
            fields=keywords.fields,
        )
        return keywords, options

    def _answer(
        self,
        renders: Sequence[Callable[[], Any]],
        sampling: Sampling | Sequence[Sampling] | None,
        keywords: Keywords,
        options: RequestOptions,
        stock: Mapping[str, Any],
        use_tqdm: bool | Callable[..., tqdm[Any]],
        raise_on_error: bool,
    ) -> list[OmniRequestOutput]:
        given = sampling if sampling is not None or keywords.params else self.get_default_sampling_params()
        each: Sequence[Any] = self._params_to_seq(given or {}, len(renders))  # type: ignore[type-var]
        split = [self._split(keywords.over(params), options) for params in each]
        adapters = self._lora_request_to_seq(stock["lora_request"], len(renders))
        priorities = self._priority_to_seq(stock["priority"], len(renders))
        bar_type: Any = use_tqdm if callable(use_tqdm) else tqdm
        bar = bar_type(total=len(renders), desc="Processed prompts", dynamic_ncols=True) if use_tqdm else None
        pending: list[Future[OmniRequestOutput]] = []
        try:
            for render, (text, chosen), adapter, number in zip(renders, split, adapters, priorities, strict=True):
                pending.append(self._submit(render, text, chosen, {"lora_request": adapter, "priority": number}))
            if bar is not None:
                for future in pending:
                    future.add_done_callback(lambda done: None if done.cancelled() else bar.update())
            outputs = [future.result() for future in pending]
        except CancelledError:
            raise StageUnavailable(CLOSED) from None
        finally:
            for future in pending:  # after an error or Ctrl-C, the engine aborts the requests
                future.cancel()
            if bar is not None:
                bar.close()
        if errors := [output.error for output in outputs if output.error is not None]:
            message = f"{len(errors)} of {len(outputs)} failed: {errors[0]}"
            if raise_on_error:
                raise RequestFailed(message) from errors[0]
            log.warning("%s", message)
        return outputs

    def _submit(
        self, render: Callable[[], Any], text: SamplingParams, chosen: RequestOptions, stock: Mapping[str, Any]
    ) -> Future[OmniRequestOutput]:
        number = str(next(self._numbers))
        try:
            prompt = render()
        except Exception as error:  # this prompt cannot be rendered; the others can
            named = isinstance(error, (VLLMError, ValueError, TypeError, OSError))
            reason = str(error) if named else f"{type(error).__name__}: {error}"
            refused = RequestError(reason, parameter="prompt")
            refused.__cause__ = error
            failed: Future[OmniRequestOutput] = Future()
            failed.set_result(self._complete(_failed(number, refused), {}))
            return failed
        adapter = self._resolve_mm_lora(prompt, stock["lora_request"])
        return self._start(self._one(number, prompt, text, chosen, {**stock, "lora_request": adapter}))

    def _split(self, params: Any, options: RequestOptions) -> tuple[SamplingParams, RequestOptions]:
        if isinstance(params, SamplingParams):
            return params, options
        given = {stage: each for stage, each in params.items() if each is not None}
        by_stage = {name: self._of_stage(self.plan.model_stage(name), each) for name, each in given.items()}
        text = by_stage.get(self.plan.frontend().model_stage)
        if not isinstance(text, SamplingParams):
            return self.get_default_sampling_params(), replace(options, params=by_stage)
        others = {stage: each for stage, each in by_stage.items() if each is not text}
        return text, replace(options, params=others)

    def _of_stage(self, stage: StagePlan, given: Any) -> Any:
        sampled_text = stage.model_stage == self.plan.frontend().model_stage and stage.params_type == SAMPLING_PARAMS
        defaults = self._text_defaults() if sampled_text else stage.params
        return stage_params(stage, given, defaults, frontend=sampled_text)

    async def _one(
        self, number: str, prompt: Any, params: SamplingParams, options: RequestOptions, stock: Mapping[str, Any]
    ) -> OmniRequestOutput:
        params = params.clone()
        params.output_kind = RequestOutputKind.FINAL_ONLY
        text: RequestOutput | None = None
        outputs = TextOutputs(number, delta=False)
        ids = prompt.get("prompt_token_ids", ()) if isinstance(prompt, Mapping) else ()
        chunks: dict[str, list[OutputChunk]] = {}
        try:
            async for item in self._omni.generate(prompt, params, number, options=options, **stock):
                if isinstance(item, OutputChunk):
                    chunks.setdefault(item.modality, []).append(item)
                if isinstance(item, TextChunk):
                    text = outputs.output(ids, item)
                elif not isinstance(item, OutputChunk):
                    text = item
        except OmniError as error:
            return self._complete(_failed(number, error), {})
        except Exception as error:  # vLLM's own errors (bad parameters, engine gone) fail this prompt only
            return self._complete(_failed(number, RequestFailed(str(error) or type(error).__name__)), {})
        return self._complete(text or outputs.output(ids), chunks)

    def _complete(self, text: RequestOutput, chunks: dict[str, list[OutputChunk]]) -> OmniRequestOutput:
        """Turn the frontend's output, in place, into an `OmniRequestOutput` with the chunks of all modalities."""
        text.__class__ = OmniRequestOutput
        assert isinstance(text, OmniRequestOutput)
        text.outputs_by_modality = chunks
        for name, modality in self._modalities.items():
            if name in chunks or name not in CORE:  # attributes of the core have defaults
                for attribute, value in modality.offline(chunks.get(name, ())).items():
                    setattr(text, attribute, value)
        return text

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the frontend's default parameters: the stage config's override the model's generation config."""
        return SamplingParams.from_optional(**self._text_defaults())

    def _text_defaults(self) -> dict[str, Any]:
        return {**self.model_config.get_diff_sampling_param(), **self.plan.frontend().sampling}

    def get_tokenizer(self) -> Any:
        """Return the frontend's tokenizer."""
        return self.renderer.get_tokenizer()

    @property
    def llm_engine(self) -> Any:
        """Return an object with the frontend's `model_config`, `vllm_config`, `renderer` and `input_processor`.

        Programs such as lm-eval read `llm.llm_engine.model_config`. Methods that need a single engine (`beam_search`,
        `enqueue`, `get_metrics`, ...) raise NotImplementedError.
        """
        return _Frontend(self._omni)

    # -- the end ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End all processes and threads of this object; a second call does nothing.

        A call of another thread, e.g. `generate`, ends with an error.
        """
        if self._replica_supervisor is not None:
            self._replica_supervisor.close()
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None:
            asyncio.run_coroutine_threadsafe(self._disconnect(), loop).result()
            wait(list(self._calls), CLOSE_S)
            # The loop is closed, not only stopped: vLLM's finalizers would let a stopped loop close their sockets, and
            # it would never do so.
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join()
        self._deployment.close()
        if self._replica_supervisor is not None:
            self._replica_supervisor.join()
            self._replica_supervisor = None

    async def _disconnect(self) -> None:
        if "_omni" in vars(self):
            self._omni.shutdown(timeout=0)

    def __enter__(self) -> OmniLLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"OmniLLM(model={self.plan.model!r}, stages={[stage.name for stage in self.plan.stages]})"


class LocalListener:
    """The `runtime.supervise.process_watcher.ReplicaListener` of `OmniLLM`.

    The thread that watches the replicas' processes calls its methods. They pass the events to `ReplicaConnections` in
    `OmniLLM`'s event loop.
    """

    def __init__(self, deployment: Deployment, replica_connections: ReplicaConnections) -> None:
        self._deployment = deployment
        self._replica_connections = replica_connections

    def listen(self, replica: ReplicaId) -> Sequence[tuple[str, str]]:
        """Open sockets for a replica before it starts; return their addresses, one pair (input, output)."""
        addresses = self._deployment.listen(replica)
        self._replica_connections.loop.call_soon_threadsafe(self._replica_connections.starting, replica)
        return addresses

    def ready(self, replica: ReplicaId, about: ReplicaInfo) -> None:
        """Make the event loop connect to a replica that has started; `about` describes its process."""
        listeners = self._deployment.listeners(replica, 0)
        self._replica_connections.loop.call_soon_threadsafe(self._replica_connections.ready, replica, about, listeners)

    def ended(self, replica: ReplicaId, reason: str, *, again: bool) -> None:
        """Make the event loop disconnect from a replica whose process has ended.

        Args:
            again: whether the process will be started again.
        """
        self._replica_connections.loop.call_soon_threadsafe(
            partial(self._replica_connections.ended, replica, reason, again=again)
        )


def _with_media(prompt: Any) -> Any:
    """Return a prompt whose keys in `MEDIA` are moved into `multi_modal_data`, where vLLM reads them."""
    if not isinstance(prompt, Mapping) or not any(name in prompt for name in MEDIA):
        return prompt
    media = {name: prompt[name] for name in MEDIA if prompt.get(name) is not None}
    rest = {name: value for name, value in prompt.items() if name not in MEDIA}
    return {**rest, "multi_modal_data": {**(prompt.get("multi_modal_data") or {}), **media}}


def _identity(replica: ReplicaId, ports: tuple[int, int] | None) -> ReplicaIdentity:
    """Return the identity that a replica's process gets: it has no coordinator, and ends with this program.

    Args:
        ports: first and last port on which the replica may listen for other hosts; None: any.
    """
    return ReplicaIdentity(stage=replica.stage, index=replica.index, program=os.getpid(), ports=ports)


class _Frontend:
    """The value of `OmniLLM.llm_engine`: the attributes of vLLM's `LLMEngine` that need no engine in this process."""

    def __init__(self, omni: AsyncOmni) -> None:
        self.model_config = omni.model_config
        self.vllm_config = omni.vllm_config
        self.renderer = omni.renderer
        self.input_processor = omni.input_processor

    def __getattr__(self, name: str) -> Any:
        raise NotImplementedError(f"llm_engine.{name} is not available with omni=True; use generate() or chat()")


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
        if tasks := asyncio.all_tasks(loop):  # calls of other threads, which wait for these tasks
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.wait(tasks, timeout=CLOSE_S))
    finally:
        loop.close()


def _end(program: int, deployment: Any, supervisor: Any) -> None:
    if os.getpid() != program:  # a fork of the program inherits the hook, but not the replicas
        return
    supervisor.abandon()  # otherwise it would restart the replicas that end now
    deployment.close()


def _failed(request_id: str, error: OmniError) -> OmniRequestOutput:
    empty = CompletionOutput(
        index=0, text="", token_ids=[], cumulative_logprob=None, logprobs=None, finish_reason="error"
    )
    output = OmniRequestOutput(
        request_id=request_id,
        prompt=None,
        prompt_token_ids=None,
        prompt_logprobs=None,
        outputs=[empty],
        finished=True,
    )
    output.error = error
    return output
