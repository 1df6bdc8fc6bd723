"""`AsyncOmni`: vLLM's `AsyncLLM` whose answers may also be heard."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextvars import ContextVar
from copy import deepcopy
from typing import Any

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.utils.collection_utils import as_list
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor import Executor

from vllm_omni_ext.disaggregation.parameters import KEY
from vllm_omni_ext.errors import OmniError, RequestError, RequestFailed, StageUnavailable
from vllm_omni_ext.grammars import refuse_empty_grammar
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.metrics import Metrics
from vllm_omni_ext.model_plugins.registry import pipeline_for, resolve
from vllm_omni_ext.observability.engine_stats import engine_order, name_engines, stats_of_all, tokens_of
from vllm_omni_ext.observability.observer import Observer
from vllm_omni_ext.observability.record import Record
from vllm_omni_ext.observability.spans import emit_spans
from vllm_omni_ext.observability.trace_files import TraceFiles
from vllm_omni_ext.orchestrator.naming import in_model_terms
from vllm_omni_ext.orchestrator.orchestrator import Orchestrator
from vllm_omni_ext.orchestrator.recital import Recital, make_recital
from vllm_omni_ext.orchestrator.requests import OmniOptions
from vllm_omni_ext.outputs import AudioOutput
from vllm_omni_ext.pool.policies import policy
from vllm_omni_ext.pool.stage_pool import StagePool
from vllm_omni_ext.runtime.client import stand_in
from vllm_omni_ext.runtime.fleet import Connections, Fleet
from vllm_omni_ext.runtime.replica import StockReplica
from vllm_omni_ext.runtime.targeted import TargetedLLM
from vllm_omni_ext.runtime.text_client import TextClient
from vllm_omni_ext.topology.shape import StagePlan
from vllm_omni_ext.wire.handoff import RESERVED, TICKET

REQUEST_OPTIONS: ContextVar[OmniOptions | None] = ContextVar("omni_request_options", default=None)
"""Options for requests made by stock handlers, which know nothing of them; read when `generate` is called."""

MOST_BAD_CHARACTERS = 100_000
"""In `bad_words`; tokenizing so many takes a few hundredths of a second."""

_TEXT_END = object()


class AsyncOmni(TargetedLLM):
    """Serves a pipeline. Must be made inside a running event loop.

    Text requests run exactly as in `AsyncLLM`; requests with other modalities also pass through the stages behind.
    """

    _draining = False
    _fleet_open: Fleet | None = None
    """None after `shutdown`, and before `__init__` is through: `__del__` may come first."""

    def __init__(self, connections: Connections, *, log_stats: bool = True, log_requests: bool = False) -> None:
        plan = connections.plan
        self.plan = plan
        self.connections = connections
        self._connected = False
        replicas = connections.connect_all()
        text = plan.text_stage().name
        config = deepcopy(connections.configs[text])
        config.shutdown_timeout = connections.drain_s
        said = next((each.client.said for replica, each in replicas.items() if replica.stage == text), b"")
        with stand_in(connections.folder, said) as addresses:
            if connections.board is not None and connections.client_count > 1:
                addresses["mp_admission_counters"] = connections.board.admitted
            super().__init__(
                vllm_config=config,
                executor_class=Executor.get_class(config),
                log_stats=log_stats,
                log_requests=log_requests,
                client_addresses=addresses,
                client_count=connections.client_count,
                client_index=connections.client_index,
            )
        self.engine_core.shutdown(timeout=0)
        self._start(config, replicas)

    def _start(self, config: VllmConfig, replicas: Mapping[ReplicaId, StockReplica]) -> None:
        pipeline = pipeline_for(config.model_config.architectures[0])
        plugin = resolve(pipeline.request_plugin)(config.model_config.hf_config, self.plan.chunks)
        self.plugin = in_model_terms(plugin, {each.name: each.part_of for each in self.plan.stages if each.part_of})
        text_stage = self.plan.text_stage().name
        self._observe(config, replicas)
        self.orchestrator = Orchestrator(
            plugin=self.plugin,
            text_stage=text_stage,
            prefill_stage=self.plan.source_of(text_stage),
            pools={stage.name: self._pool(stage, replicas) for stage in self.plan.stages},
            replicas=replicas,
            sampling={stage.name: stage.sampling for stage in self.plan.stages},
            limits={stage: each.model_config.max_model_len for stage, each in self.connections.configs.items()},
            observer=self.observer,
            wait_s=self.plan.config.replica_wait_s,
            joinable=self.plan.config.master_address is not None,
            failed=self._tell_caller,
            chunk_deadline_s=self.plan.config.chunk_deadline_s,
        )
        text = {replica: each for replica, each in replicas.items() if self._is_text(replica)}
        self.engine_core = TextClient(config, text, self.orchestrator, self.plan.sides())
        self.fleet = Fleet(
            self.connections, self.orchestrator, replicas, take=self._take, joined=self._joined, lost=self._lost
        )
        self._fleet_open = self.fleet
        self._connected = True
        self.fleet.start()
        self._run_output_handler()

    def _pool(self, stage: StagePlan, replicas: Iterable[ReplicaId]) -> StagePool:
        chosen = self.plan.config.stage(stage.name).lb_policy or self.plan.config.lb_policy
        return StagePool(
            stage.name,
            (replica for replica in replicas if replica.stage == stage.name),
            policy(chosen, self.connections.client_index),
            changed=self.observer.bound,
            decided=self.observer.decided,
            clients=self.connections.client_count,
        )

    def _is_text(self, replica: ReplicaId) -> bool:
        return replica.stage == self.plan.text_stage().name

    def _observe(self, config: VllmConfig, replicas: Mapping[ReplicaId, StockReplica]) -> None:
        """Set up what is noted about requests and replicas, and vLLM's statistics for all of them."""
        text = self.plan.text_stage().name
        metrics = Metrics(str(config.model_config.served_model_name))
        self._tracing = config.observability_config.otlp_traces_endpoint is not None
        which, keep = self.connections.client_index, self.plan.config.kept_traces
        several = self.connections.client_count > 1
        self.trace_files = TraceFiles(self.connections.folder, which, keep) if several else None
        self.observer = Observer(
            metrics,
            text_stage=text,
            replicas=replicas,
            keep=keep,
            ended=self._ended,
        )
        order = engine_order(text, list(replicas))
        name_engines(metrics, order)
        self._engine_numbers = {replica: number for number, replica in enumerate(order)}
        self._first_numbers = {replica.stage: number for replica, number in reversed(self._engine_numbers.items())}
        if self.log_stats:  # vLLM's constructor knew of the first replica only
            configs = [replicas[replica].client.vllm_config for replica in order]
            self.logger_manager = stats_of_all(config, configs, client_count=self._client_count)

    def _ended(self, record: Record) -> None:
        if self._tracing:
            emit_spans(record, self.plan.text_stage().name)
        if self.trace_files is not None and self.observer.course(record.request_id) is record:
            self.trace_files.write(record)

    def _loaded(self, replica: ReplicaId, outputs: EngineCoreOutputs) -> None:
        if outputs.scheduler_stats is not None:  # else it went to another API server
            self.observer.loaded(replica, outputs.scheduler_stats)
        if replica not in self._engine_numbers:
            # vLLM's loggers know the engines of the start: what has joined since counts as the stage's first one.
            outputs.scheduler_stats = None
        outputs.engine_index = self._engine_numbers.get(replica, self._first_numbers.get(replica.stage, 0))
        if self.logger_manager is not None and not self._is_text(replica):
            made = tokens_of(outputs)
            self.logger_manager.record(outputs.scheduler_stats, made, engine_idx=outputs.engine_index)

    def _run_output_handler(self) -> None:
        if self._connected:  # AsyncLLM's constructor calls it too early
            super()._run_output_handler()

    async def _take(self, replica: ReplicaId, outputs: EngineCoreOutputs) -> None:
        current = [output for output in outputs.outputs if await self.orchestrator.produced(replica, output)]
        self._loaded(replica, outputs)  # what was made goes on first
        if self._is_text(replica):
            # An output that carried nothing but exported rows is no news for the client.
            outputs.outputs = [o for o in current if o.new_token_ids or o.finish_reason is not None]
            self.engine_core.deliver(outputs)

    def _joined(self, replica: StockReplica) -> None:
        if self._is_text(replica.id):
            self.engine_core.joined(replica)

    def _lost(self, replica: ReplicaId) -> None:
        if self._is_text(replica):
            self.engine_core.lost(replica)

    def _tell_caller(self, request_id: str, error: OmniError) -> None:
        state = self.output_processor.request_states.get(request_id)
        if state is not None and state.queue is not None:
            state.queue.put(error)

    async def _drain(self, timeout: float) -> None:
        """Take no new requests, and give those in flight some seconds."""
        self._draining = True
        quiet = asyncio.Event()
        self.observer.watch_quiet(quiet.set)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await quiet.wait()
                await self.engine_core.delivered()

    def _stop(self) -> None:
        self.fleet.close()
        self.orchestrator.fail_all(StageUnavailable("the server is shutting down"))
        self.output_processor.propagate_error(EngineDeadError())

    # -- requests -----------------------------------------------------------------------------------------------

    def generate(  # type: ignore[override]
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        options: OmniOptions | None = None,
        **stock: Any,
    ) -> AsyncGenerator[Any, None]:
        """As `AsyncLLM.generate`; with options that ask for sound, `AudioOutput`s come between the `RequestOutput`s.

        Args:
            options: what to answer with; None takes `REQUEST_OPTIONS`, and text alone if that is not set.

        Raises:
            RequestError: the options or the prompt cannot be served.
            StageUnavailable: a stage that is needed has no live replica.
            RequestFailed: a stage could not finish the request.
        """
        if self._draining:
            raise StageUnavailable("the server is shutting down")
        _check_reserved(sampling_params)
        _check_bad_words(sampling_params)
        refuse_empty_grammar(sampling_params)
        chosen = options or REQUEST_OPTIONS.get()
        if chosen is None or chosen.text_only:
            return self._in_time(super().generate(prompt, sampling_params, request_id, **stock))
        if isinstance(prompt, dict) and "prompt_token_ids" in prompt:  # rendered: what is wrong with it shows now
            self.orchestrator.room(prompt["prompt_token_ids"], chosen)
        return self._in_time(self._generate_more(prompt, sampling_params, request_id, chosen, stock))

    def _in_time(self, source: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
        limit = self.plan.config.request_deadline_s
        return source if limit is None else _until(limit, source)

    async def _generate_more(
        self, prompt: Any, params: SamplingParams, request_id: str, options: OmniOptions, stock: dict[str, Any]
    ) -> AsyncGenerator[Any, None]:
        if params.n != 1:
            raise RequestError("n: must be 1 when sound is asked for", parameter="n")
        sink: asyncio.Queue[Any] = asyncio.Queue()
        ticket = self.orchestrator.expect(options, sink)
        params = params.clone()
        params.extra_args = {**(params.extra_args or {}), TICKET: ticket}
        text = asyncio.create_task(self._text_into(sink, super().generate(prompt, params, request_id, **stock)))
        try:
            waiting = {_TEXT_END, AudioOutput}
            while waiting:
                item = await sink.get()
                if isinstance(item, BaseException):
                    raise item
                if item is _TEXT_END:
                    waiting.discard(_TEXT_END)
                    continue
                if isinstance(item, AudioOutput) and item.finished:
                    waiting.discard(AudioOutput)
                yield item
        finally:
            text.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await text
            await self.orchestrator.withdraw(ticket)

    async def speak(self, text: str, options: OmniOptions, request_id: str) -> Recital:
        """Read a text out, word for word; the text stage is not used. Iterate over the result for the sound.

        Raises:
            RequestError: there is nothing to read, or more than the stages can take.
            StageUnavailable: a stage has no live replica.
        """
        if self._draining:
            raise StageUnavailable("the server is shutting down")
        return await make_recital(self.orchestrator, self.renderer, text, options, request_id)

    def get_num_unfinished_requests(self) -> int:
        """As vLLM counts them, and those without a text stage."""
        return super().get_num_unfinished_requests() + self.orchestrator.recitals

    async def _text_into(self, sink: asyncio.Queue[Any], source: AsyncGenerator[Any, None]) -> None:
        try:
            async with contextlib.aclosing(source):
                async for output in source:
                    sink.put_nowait(output)
            sink.put_nowait(_TEXT_END)
        except Exception as error:  # handed to the caller, who waits on the sink
            cause = error.__cause__
            sink.put_nowait(cause if isinstance(cause, OmniError) else error)

    async def notify_kv_transfer_request_rejected(self, *_: Any, **__: Any) -> None:
        """Nothing: vLLM's server would tell an engine of a KV cache that a client has named in a refused request."""

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """Abort requests in every stage."""
        given = (request_id,) if isinstance(request_id, str) else as_list(request_id)
        await self.orchestrator.abort(self.output_processor.abort_requests(given, internal))

    def shutdown(self, timeout: float | None = None) -> None:
        """Fail what is in flight and close the connections; processes belong to the launcher.

        vLLM's server calls it from another thread; a second call does nothing.

        Args:
            timeout: what is in flight is given so long to end, in seconds; nothing new is taken meanwhile.
        """
        fleet, self._fleet_open = self._fleet_open, None
        if fleet is None:
            return
        if timeout and not fleet.loop.is_closed() and not _is_running(fleet.loop):
            asyncio.run_coroutine_threadsafe(self._drain(timeout), fleet.loop).result()
        if not fleet.loop.is_closed():
            if _is_running(fleet.loop):
                self._stop()
            else:
                fleet.loop.call_soon_threadsafe(self._stop)
        for replica in fleet.replicas.values():
            if not self._is_text(replica.id):
                replica.close(timeout)
        super().shutdown(timeout)


def _check_bad_words(params: Any) -> None:
    """Words to avoid are tokenized in the event loop.

    Raises:
        VLLMValidationError: they would take it for too long.
    """
    given = sum(map(len, getattr(params, "bad_words", None) or ()))
    if given > MOST_BAD_CHARACTERS:
        message = f"bad_words: may have {MOST_BAD_CHARACTERS} characters together, got {given}"
        raise VLLMValidationError(message, parameter="bad_words")


def _check_reserved(params: Any) -> None:
    """Keys that our stages read are not a client's to set, through whichever endpoint it came.

    Raises:
        VLLMValidationError: it names a KV cache; an engine would believe it, or die of it. Every handler of vLLM's
            knows this error.
    """
    given = getattr(params, "extra_args", None)
    if given and given.get(KEY) is not None:
        message = f"{KEY}: replicas settle among themselves what they transfer; remove it"
        raise VLLMValidationError(message, parameter=KEY)
    if given and RESERVED & given.keys():
        params.extra_args = {key: value for key, value in given.items() if key not in RESERVED} or None


async def _until(limit_s: float, source: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    """Pass items on for `limit_s` seconds; then end the source and raise RequestFailed."""
    end = asyncio.get_running_loop().time() + limit_s
    async with contextlib.aclosing(source):
        while True:
            try:
                async with asyncio.timeout_at(end):
                    item = await anext(source)
            except StopAsyncIteration:
                return
            except TimeoutError as error:
                raise RequestFailed(f"the request took longer than {limit_s:g} s (request_deadline_s)") from error
            yield item


def _is_running(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether this thread is running `loop`."""
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False
