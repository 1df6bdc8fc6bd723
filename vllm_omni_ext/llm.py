"""`OmniLLM`: vLLM's offline `LLM` for multi-stage models. `LLM(model, omni=True)` makes one."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from socket import gethostname
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from tqdm import tqdm
from vllm.exceptions import VLLMError
from vllm.inputs import PromptType
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.renderers.chat_utils import load_chat_template
from vllm.renderers.inputs.preprocess import conversation_to_seq, prompt_to_seq
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.usage.usage_lib import UsageContext

from vllm_omni_ext.compat import activate
from vllm_omni_ext.errors import OmniError, RequestError, RequestFailed
from vllm_omni_ext.llm_calls import TargetedOfflineLLM
from vllm_omni_ext.orchestrator.requests import OmniOptions
from vllm_omni_ext.outputs import AudioOutput

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from vllm_omni_ext.ids import ReplicaId
    from vllm_omni_ext.runtime.fleet import About, Fleet
    from vllm_omni_ext.runtime.launcher import Deployment

Sampling: TypeAlias = SamplingParams | Mapping[str, SamplingParams]


class OmniRequestOutput(RequestOutput):
    """A vLLM `RequestOutput` with the sound of the answer.

    Attributes:
        audio: float32 [samples] in [-1, 1], mono; None if no sound was asked for or made.
        sample_rate: Hz; None without sound.
        frames: codec frames, int64 [frames, code groups]; None without sound.
        note: why there is no sound although it was asked for.
        error: why this prompt failed; its `outputs` is then one empty completion with finish_reason "error".
    """

    audio: np.ndarray[Any, Any] | None = None
    sample_rate: int | None = None
    frames: np.ndarray[Any, Any] | None = None
    note: str | None = None
    error: OmniError | None = None


class OmniLLM(TargetedOfflineLLM):
    """Runs a pipeline inside this Python program; `close()` (or leaving a `with` block) ends its processes.

    Args:
        model: directory or hub id.
        stage_config: as `--stage-config`.
        stage_overrides: as `--stage-overrides`, e.g. {"talker": {"replicas": 2}}.
        async_chunk: as `--async-chunk`.
        kwargs: `EngineArgs` fields for the text stage, as for `LLM`.

    Raises:
        ConfigError: something in the arguments or the model's config is wrong; nothing was started.
        StartFailed: a stage did not come up.
    """

    def __init__(self, model: str, *, chat_template: str | None = None, **kwargs: Any) -> None:
        activate()
        from vllm_omni_ext.cli.settings import from_kwargs
        from vllm_omni_ext.runtime.keeper import Keeper
        from vllm_omni_ext.runtime.launcher import Deployment
        from vllm_omni_ext.runtime.progress import spinner
        from vllm_omni_ext.runtime.supervisor import Supervisor

        kwargs.setdefault("disable_log_stats", True)
        plan = from_kwargs(model, **kwargs)
        self._deployment = Deployment(plan, clients=1, usage=UsageContext.LLM_CLASS)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._supervisor: Supervisor[Any] | None = None
        self._keeper: Keeper | None = None
        self._deployment.__enter__()
        try:
            with spinner("loading") as show, self._deployment.progress.shown(show):
                self._deployment.wait()
            self._loop, self._thread = _start_loop()
            self._omni = self._run(self._connect(log_stats=not kwargs["disable_log_stats"]))
            self._supervisor = Supervisor(self._deployment.processes(), self._ended)
            self._keeper = Keeper(
                self._deployment,
                OneUser(self._deployment, self._omni.fleet),
                host=gethostname(),
                tell=log.warning,
                watch=self._supervisor.watch,
            )
        except BaseException:
            self.close()
            raise
        self._finalizer = weakref.finalize(self, _end, self._deployment)
        self.plan = plan
        self.model_config = self._omni.model_config
        self.renderer = self._omni.renderer
        self.input_processor = self._omni.input_processor
        self.runner_type = self.model_config.runner_type
        self.chat_template = load_chat_template(chat_template)
        self.default_sampling_params: dict[str, Any] | None = None
        self._numbers = itertools.count()

    async def _connect(self, *, log_stats: bool) -> Any:
        from vllm_omni_ext.omni import AsyncOmni

        return AsyncOmni(self._deployment.connections(0), log_stats=log_stats)

    def _ended(self, replica: Any, exitcode: int | None) -> None:
        if self._keeper is not None:
            self._keeper.ended(replica, exitcode)

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    # -- requests -----------------------------------------------------------------------------------------------

    def generate(  # type: ignore[override]
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: Sampling | Sequence[Sampling] | None = None,
        *,
        modalities: Sequence[str] | None = None,
        voice: str | None = None,
        chunks: Mapping[str, Any] | None = None,
        use_tqdm: bool | Callable[..., tqdm[Any]] = True,
        **rendering: Any,
    ) -> list[OmniRequestOutput]:
        """Answer prompts; one output each, in order. A prompt that fails has `error` set, the others are unaffected.

        Args:
            sampling_params: for the text stage, or by stage name, e.g. {"thinker": ..., "talker": ...}; one for
                all prompts or a list with one each.
            modalities: what to answer with, e.g. ["text", "audio"]; None: all the model can do.
            voice: speaker name; None: the checkpoint's default.
            chunks: what to change in the stage config's `chunks` for these prompts.
            rendering: `tokenization_kwargs`, `mm_processor_kwargs` as for `LLM.generate`.

        Raises:
            RequestError: the modalities, the voice or the chunks do not exist.
        """
        items = prompt_to_seq(prompts)
        return self._answer(
            [partial(self._preprocess_cmpl_one, prompt, **rendering) for prompt in items],
            sampling_params,
            OmniOptions(modalities=self._modalities(modalities), voice=voice, chunks=chunks or {}),
            use_tqdm,
        )

    def chat(  # type: ignore[override]
        self,
        messages: Any,
        sampling_params: Sampling | Sequence[Sampling] | None = None,
        use_tqdm: bool | Callable[..., tqdm[Any]] = True,
        *,
        modalities: Sequence[str] | None = None,
        voice: str | None = None,
        chunks: Mapping[str, Any] | None = None,
        **rendering: Any,
    ) -> list[OmniRequestOutput]:
        """Answer conversations (one, or a list of them); otherwise as `generate`.

        Args:
            rendering: `chat_template`, `add_generation_prompt`, `tools`, `mm_processor_kwargs`, ... as for `LLM.chat`.
        """
        items = conversation_to_seq(messages)
        return self._answer(
            [partial(self._preprocess_chat_one, conversation, **rendering) for conversation in items],
            sampling_params,
            OmniOptions(modalities=self._modalities(modalities), voice=voice, chunks=chunks or {}),
            use_tqdm,
        )

    def _modalities(self, given: Sequence[str] | None) -> tuple[str, ...]:
        return self._omni.plugin.output_modalities if given is None else tuple(given)

    def _answer(
        self,
        renders: list[Callable[[], Any]],
        sampling: Sampling | Sequence[Sampling] | None,
        options: OmniOptions,
        use_tqdm: bool | Callable[..., tqdm[Any]],
    ) -> list[OmniRequestOutput]:
        self._omni.plugin.check(options)
        given = sampling if sampling is not None else self.get_default_sampling_params()
        each: Sequence[Any] = self._params_to_seq(given, len(renders))  # type: ignore[type-var, arg-type]
        bar_type: Any = use_tqdm if callable(use_tqdm) else tqdm
        bar = bar_type(total=len(renders), desc="Processed prompts", dynamic_ncols=True) if use_tqdm else None
        pending = [self._submit(render, params, options) for render, params in zip(renders, each, strict=True)]
        if bar is not None:
            for future in pending:
                future.add_done_callback(lambda _: bar.update())
        outputs = [future.result() for future in pending]
        if bar is not None:
            bar.close()
        return outputs

    def _submit(self, render: Callable[[], Any], params: Any, options: OmniOptions) -> Future[OmniRequestOutput]:
        number = str(next(self._numbers))
        text, chosen = self._split(params, options)
        try:
            prompt = render()
        except (VLLMError, ValueError, TypeError, OSError) as error:  # this prompt cannot be rendered; the others can
            failed: Future[OmniRequestOutput] = Future()
            failed.set_result(_failed(number, RequestError(str(error), parameter="prompt")))
            return failed
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(self._one(number, prompt, text, chosen), self._loop)

    def _split(self, params: Any, options: OmniOptions) -> tuple[SamplingParams, OmniOptions]:
        if isinstance(params, SamplingParams):
            return params, options
        text_stage = self.plan.text_stage().model_stage
        for stage in params:
            self.plan.model_stage(stage)
        text = params.get(text_stage) or self.get_default_sampling_params()
        others = {stage: value for stage, value in params.items() if stage != text_stage}
        return text, replace(options, sampling=others)

    async def _one(self, number: str, prompt: Any, params: SamplingParams, options: OmniOptions) -> OmniRequestOutput:
        params = params.clone()
        params.output_kind = RequestOutputKind.FINAL_ONLY
        text: RequestOutput | None = None
        pieces: list[AudioOutput] = []
        try:
            async for item in self._omni.generate(prompt, params, number, options=options):
                if isinstance(item, AudioOutput):
                    pieces.append(item)
                else:
                    text = item
        except OmniError as error:
            return _failed(number, error)
        except Exception as error:  # vLLM's own errors (bad parameters, engine gone) fail this prompt only
            return _failed(number, RequestFailed(str(error) or type(error).__name__))
        assert text is not None
        return _with_sound(text, pieces)

    def get_default_sampling_params(self) -> SamplingParams:
        """The text stage's defaults: the model's generation config under those of the stage config."""
        base = self.model_config.get_diff_sampling_param()
        return SamplingParams.from_optional(**{**base, **self.plan.text_stage().sampling})

    def get_tokenizer(self) -> Any:
        """The text stage's tokenizer."""
        return self.renderer.get_tokenizer()

    @property
    def llm_engine(self) -> Any:
        """What only a single engine can do (`beam_search`, `enqueue`, `get_metrics`, ...) is not available here."""
        raise NotImplementedError("this method is not available with omni=True; use generate() or chat()")

    # -- the end ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End everything this object started; a second call does nothing."""
        if self._supervisor is not None:
            self._supervisor.stop()
            self._supervisor = None
        if self._keeper is not None:
            self._keeper.close()
        if self._loop is not None:
            loop, self._loop = self._loop, None
            asyncio.run_coroutine_threadsafe(self._disconnect(), loop).result()
            # Closed, not only stopped: vLLM's finalizers would leave sockets to a loop that never runs again.
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join()
        self._deployment.close()
        if self._keeper is not None:
            self._keeper.join()
            self._keeper = None

    async def _disconnect(self) -> None:
        if "_omni" in vars(self):
            self._omni.shutdown(timeout=0)

    def __enter__(self) -> OmniLLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"OmniLLM(model={self.plan.model!r}, stages={[stage.name for stage in self.plan.stages]})"


class OneUser:
    """What the keeper tells those who send requests: here it is this program's loop alone."""

    def __init__(self, deployment: Deployment, fleet: Fleet) -> None:
        self._deployment = deployment
        self._fleet = fleet

    def listen(self, replica: ReplicaId) -> Sequence[tuple[str, str]]:
        """Where a replica that is going to start connects to."""
        addresses = self._deployment.listen(replica)
        self._fleet.loop.call_soon_threadsafe(self._fleet.starting, replica)
        return addresses

    def ready(self, replica: ReplicaId, about: About) -> None:
        """A replica that was listened for can be used."""
        listeners = self._deployment.listeners(replica, 0)
        self._fleet.loop.call_soon_threadsafe(self._fleet.ready, replica, about, listeners)

    def ended(self, replica: ReplicaId, reason: str, *, again: bool) -> None:
        """A replica is gone."""
        self._fleet.loop.call_soon_threadsafe(partial(self._fleet.ended, replica, reason, again=again))


def _start_loop() -> tuple[asyncio.AbstractEventLoop, threading.Thread]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=_run_loop, args=(loop,), name="omni-loop", daemon=True)
    thread.start()
    return loop, thread


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


def _end(deployment: Any) -> None:
    deployment.close()


def _with_sound(text: RequestOutput, pieces: list[AudioOutput]) -> OmniRequestOutput:
    text.__class__ = OmniRequestOutput
    assert isinstance(text, OmniRequestOutput)
    if pieces:
        last = pieces[-1]
        text.note = last.note
        text.sample_rate, text.frames = last.sample_rate, last.frames
        samples = np.concatenate([piece.samples for piece in pieces])
        text.audio = samples if len(samples) else None
    return text


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
