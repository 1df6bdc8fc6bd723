"""`AsyncOmni`: vLLM's `AsyncLLM` for a pipeline of stages, whose answers may contain other modalities than text."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from copy import deepcopy
from functools import partial
from typing import Any

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.renderers.inputs.preprocess import extract_prompt_components
from vllm.sampling_params import SamplingParams
from vllm.utils.collection_utils import as_list
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor import Executor

from vllm_omni_ext.disaggregation.parameters import KEY
from vllm_omni_ext.errors import OmniError, RequestError, RequestFailed, StageUnavailable
from vllm_omni_ext.grammars import refuse_empty_grammar
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.metrics import Metrics
from vllm_omni_ext.modalities.registry import modalities_of
from vllm_omni_ext.observability.engine_stats import EngineNumbers, NoSeries, ReplicaStats, tokens_of
from vllm_omni_ext.observability.observer import Observer
from vllm_omni_ext.orchestrator.admission import PRIORITY, Admission, Ticket
from vllm_omni_ext.orchestrator.answers import chunks, merged, until
from vllm_omni_ext.orchestrator.engine_requests import EngineRequests, cache_scope, without_ends_of_text
from vllm_omni_ext.orchestrator.orchestrator import Orchestrator
from vllm_omni_ext.orchestrator.placement import Settings
from vllm_omni_ext.plugins.registry import family_of
from vllm_omni_ext.plugins.runtime import ModelRuntime, Rendered, RequestOptions, RuntimeContext
from vllm_omni_ext.plugins.spec import SAMPLING_PARAMS, make_params, resolve
from vllm_omni_ext.pool.stage_pool import StagePool, policy
from vllm_omni_ext.resampling import use_available
from vllm_omni_ext.runtime.client.calls import TargetedLLM
from vllm_omni_ext.runtime.client.replica import StockReplica, bootstrap_client_addresses
from vllm_omni_ext.runtime.client.replica_connections import Connections, ReplicaConnections
from vllm_omni_ext.runtime.client.text_client import TextClient
from vllm_omni_ext.runtime.launch.hf_overrides import whole_config
from vllm_omni_ext.topology.plan import StagePlan
from vllm_omni_ext.wire import priorities

MOST_BAD_CHARACTERS = 100_000
"""Most characters of all `bad_words` of a request; tokenizing that many takes a few hundredths of a second."""

_TASKS: tuple[Any, ...] = ("generate",)
"""The tasks of the frontend, for vLLM's input processor."""

_TO_RENDER = frozenset(
    ("lora_request", "tokenization_kwargs", "trace_headers", "priority", "data_parallel_rank", "session_id", "kv_hints")
)
"""Arguments of `generate` that vLLM's input processor takes; all others are for processing the outputs."""


class AsyncOmni(TargetedLLM):
    """Serves the requests of a model with several stages in one API server or one `OmniLLM`.

    Must be created inside a running event loop. A request that only the frontend answers runs exactly as in `AsyncLLM`.
    All other requests use the stages of their flow (see `plugins.flow.Flow`).

    Args:
        connections: the plan of the deployment, and the connections to its replicas.
    """

    draining = False
    """Whether the server is shutting down: it finishes the requests in flight, and refuses new ones."""

    _at_stop: tuple[Callable[[], None], ...] = ()
    _outlasting: tuple[Callable[[], Awaitable[object]], ...] = ()
    _fleet_open: ReplicaConnections | None = None
    """The connections to replicas while they are open. None after `shutdown` and before `_start`: `__del__` may run
    then."""

    def __init__(self, connections: Connections, *, log_stats: bool = True, log_requests: bool = False) -> None:
        plan = connections.plan
        self.plan = plan
        self.connections = connections
        self._connected = False
        replicas = connections.connect_all()
        frontend = plan.frontend().name
        config = deepcopy(connections.configs[frontend])
        config.shutdown_timeout = connections.drain_s
        # vLLM's handlers read the default parameters of a request there, except `max_tokens`.
        config.model_config.override_generation_config |= plan.frontend().sampling
        ready = next(
            (each.client.ready_response for replica, each in replicas.items() if replica.stage == frontend), b""
        )
        with bootstrap_client_addresses(connections.folder, ready) as addresses:
            if connections.board is not None and connections.client_count > 1:
                addresses["mp_admission_counters"] = connections.board.admitted
            super().__init__(
                vllm_config=config,
                executor_class=Executor.get_class(config),
                log_stats=log_stats,
                log_requests=log_requests,
                stat_loggers=[NoSeries] if log_stats else None,
                client_addresses=addresses,
                client_count=connections.client_count,
                client_index=connections.client_index,
            )
        self.engine_core.shutdown(timeout=0)
        self._start(config, replicas)

    def _start(self, config: VllmConfig, replicas: Mapping[ReplicaId, StockReplica]) -> None:
        frontend = self.plan.frontend()
        use_available(self.renderer)
        self.runtime = self._runtime(config)
        self._observe(config, replicas)
        settings = self.plan.config
        stages = self.plan.model_stages()
        own_types = {each.model_stage: partial(_make_params, each.params_type) for each in stages}
        self.orchestrator = Orchestrator(
            Settings(
                frontend=frontend.name,
                model_frontend=frontend.model_stage,
                prefill=self.plan.source_of(frontend.name),
                wait_s=settings.timeouts.replica_wait_timeout_s,
                joinable=settings.cluster.master_address is not None,
                input_deadline_s=settings.timeouts.chunk_timeout_s,
                client=self.connections.client_index,
                clients=self.connections.client_count,
                limits=self._lengths(),
                chunked=frozenset(stage.name for stage in self.plan.stages if stage.accepts == "chunks"),
            ),
            runtime=self.runtime,
            pools={stage.name: self._pool(stage, replicas) for stage in self.plan.stages},
            replicas=replicas,
            requests=EngineRequests({each.model_stage: each.params for each in stages}, own_types),
            observer=self.observer,
            failed=self._tell_caller,
        )
        self.admission = Admission(
            self.runtime,
            self.orchestrator,
            frontend.model_stage,
            default_modalities=settings.default_modalities,
            max_media_tokens=settings.limits.max_media_tokens,
        )
        self.capabilities = self.admission.capabilities
        logging.getLogger("vllm.v1.engine.async_llm").addFilter(_not_about_engine_requests)
        pipeline = family_of(self.plan.family).pipeline(self.plan.pipeline)
        self.engine_core = TextClient(
            config,
            self.orchestrator,
            self.plan.sides(),
            admission=self.admission,
            own_models=[each.name for each in self.plan.stages if pipeline.stage(each.model_stage).models],
        )
        self.replica_connections = ReplicaConnections(
            self.connections, self.orchestrator, replicas, take=self._take, joined=self._joined, lost=self._lost
        )
        self._fleet_open = self.replica_connections
        self._follow_operators(self.connections.operator_state, self.replica_connections)
        self._connected = True
        self.replica_connections.start()
        self._run_output_handler()

    def _lengths(self) -> dict[str, int]:
        """Return the longest sequence of each stage, in tokens."""
        return {name: each.model_config.max_model_len for name, each in self.connections.configs.items()}

    def _runtime(self, config: VllmConfig) -> ModelRuntime:
        family, model, stages = family_of(self.plan.family), config.model_config, self.plan.stages
        lengths, configs = self._lengths(), self.connections.configs
        context = RuntimeContext(
            hf_config=whole_config(model),
            pipeline=self.plan.pipeline,
            frontend=self.plan.frontend().model_stage,
            chunks=self.plan.chunks,
            limits={each.model_stage: lengths[each.name] for each in stages if each.name in lengths},
            max_num_seqs={
                each.model_stage: configs[each.name].scheduler_config.max_num_seqs
                for each in stages
                if each.name in configs
            },
            defaults={each.model_stage: each.params for each in stages},
            model_config=model,
            processor=self.renderer.mm_processor,
        )
        runtime: ModelRuntime = resolve(family.runtime)(context)
        return runtime

    def _pool(self, stage: StagePlan, replicas: Iterable[ReplicaId]) -> StagePool:
        return StagePool(
            stage.name,
            (replica for replica in replicas if replica.stage == stage.name),
            policy(self.plan.config.policy(stage.name), self.connections.client_index),
            changed=self.observer.bound,
            decided=self.observer.decided,
            clients=self.connections.client_count,
        )

    def _observe(self, config: VllmConfig, replicas: Mapping[ReplicaId, StockReplica]) -> None:
        """Create the observer of requests and replicas, and vLLM's statistics for all replicas."""
        text = self.plan.frontend().name
        metrics = Metrics(str(config.model_config.served_model_name))
        self.observer = Observer(
            metrics,
            frontend=text,
            modalities=modalities_of(family_of(self.plan.family)),
            replicas=replicas,
            alone=self.connections.client_count == 1,
            spans=config.observability_config.otlp_traces_endpoint is not None,
        )
        planned = [each.id for each in self.plan.replicas()]
        self._numbers = EngineNumbers(text, [stage.name for stage in self.plan.stages], planned)
        for replica in {*planned, *replicas}:
            self.observer.name_engine(self._numbers.of(replica), replica)
        if self.log_stats:  # vLLM's constructor received only the first replica
            configs = {replica: each.client.vllm_config for replica, each in replicas.items()}
            self.replica_stats = self.logger_manager = ReplicaStats(
                config,
                configs,
                self._numbers,
                planned=planned,
                client_count=self._client_count,
                replaces=self.connections.ready_responses is not None,
            )

    def _loaded(self, replica: ReplicaId, outputs: EngineCoreOutputs) -> None:
        if outputs.scheduler_stats is not None:  # an engine sends them to one API server only
            self.observer.loaded(replica, outputs.scheduler_stats)
        outputs.engine_index = self._numbers.of(replica)
        if self.replica_stats is not None and replica.stage != self.plan.frontend_stage:
            self.replica_stats.record(outputs.scheduler_stats, tokens_of(outputs), engine_idx=outputs.engine_index)

    def _run_output_handler(self) -> None:
        if self._connected:  # AsyncLLM's constructor calls this before the replicas are connected
            super()._run_output_handler()

    async def _take(self, replica: ReplicaId, outputs: EngineCoreOutputs) -> None:
        current = [output for output in outputs.outputs if await self.orchestrator.produced(replica, output)]
        self._loaded(replica, outputs)  # after the outputs were passed on
        if replica.stage == self.plan.frontend_stage:
            # The client gets no output that carries only exported hidden states.
            outputs.outputs = [o for o in current if o.new_token_ids or o.finish_reason is not None]
            self.engine_core.deliver(outputs)

    def _joined(self, replica: StockReplica) -> None:
        self.observer.name_engine(self._numbers.of(replica.id), replica.id)
        if self.replica_stats is not None:
            self.replica_stats.joined(replica.id, replica.client.vllm_config)

    def _lost(self, replica: ReplicaId) -> None:
        if self.replica_stats is not None:
            self.replica_stats.lost(replica)

    def _tell_caller(self, request_id: str, error: OmniError) -> None:
        state = self.output_processor.request_states.get(request_id)
        if state is not None and state.queue is not None:
            state.queue.put(error)

    def when_stopping(self, call: Callable[[], None], ended: Callable[[], Awaitable[object]] | None = None) -> None:
        """Register a function that is called once, in the event loop, when the server begins to shut down.

        Args:
            call: must not raise.
            ended: awaited after the requests in flight have ended, within the time limit of `shutdown`. It returns when
                work that lasts longer than a request, e.g. an open session, has ended.
        """
        self._at_stop += (call,)
        self._outlasting += () if ended is None else (ended,)

    def _begin_stop(self) -> None:
        self.draining = True
        calls, self._at_stop = self._at_stop, ()
        for call in calls:
            call()

    async def _drain(self, timeout: float) -> None:
        """Refuse new requests, and wait at most `timeout` seconds until those in flight have ended."""
        self._begin_stop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self.orchestrator.idle()
                await self.engine_core.delivered()
                for ended in self._outlasting:
                    await ended()

    def _stop(self) -> None:
        self._begin_stop()
        self.replica_connections.close()
        self.orchestrator.fail_all(StageUnavailable("the server is shutting down"))
        self.output_processor.propagate_error(EngineDeadError())

    # -- requests -----------------------------------------------------------------------------------------------

    def generate(  # type: ignore[override]
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        options: RequestOptions | None = None,
        **stock: Any,
    ) -> AsyncGenerator[Any, None]:
        """Yield the frontend's outputs, as `AsyncLLM.generate` does, and `OutputChunk`s of all other outputs.

        If the prompt is rendered already, the request is planned or refused before the generator is returned.

        Args:
            options: options of the request; None: the options that `Admission.expect` has registered under the key in
                `extra_args` of `sampling_params`, or the default options if there is no key.
            stock: further arguments of `AsyncLLM.generate`.

        Raises:
            RequestError: the options or the prompt cannot be served.
            StageUnavailable: a needed stage has no live replica.
            RequestFailed: a stage could not finish the request.
        """
        self._refuse_if_draining()
        if isinstance(prompt, AsyncGenerator):  # its parts would be requests of their own, on several replicas
            raise RequestError("prompt: may not be an async generator; give the whole prompt", parameter="prompt")
        ticket = self.admission.ticket(sampling_params, options)
        _check_kv_transfer(sampling_params)
        _check_bad_words(sampling_params)
        refuse_empty_grammar(sampling_params)
        ticket.priority = stock["priority"] = self._priority(stock.get("priority"))
        if isinstance(prompt, dict) and "type" in prompt:
            request = self.input_processor.process_inputs(
                request_id, prompt, sampling_params, _TASKS, **self._for_renderer(stock)
            )
            return self._in_time(
                self._answer(request, self._admit(request, ticket, sampling_params), self._prompt_text(prompt, stock))
            )
        return self._in_time(self._render_and_answer(prompt, sampling_params, request_id, ticket, stock))

    async def _render_and_answer(
        self, prompt: Any, params: SamplingParams, request_id: str, ticket: Ticket, stock: dict[str, Any]
    ) -> AsyncGenerator[Any, None]:
        if isinstance(prompt, EngineCoreRequest):
            request = prompt
        else:
            request = await self.input_processor.process_inputs_async(
                request_id, prompt, params, _TASKS, **self._for_renderer(stock)
            )
            stock = self._prompt_text(prompt, stock)
        async with contextlib.aclosing(self._answer(request, self._admit(request, ticket, params), stock)) as answer:
            async for item in answer:
                yield item

    def _for_renderer(self, stock: Mapping[str, Any]) -> dict[str, Any]:
        """Return those arguments of `generate` that vLLM's input processor takes (`_TO_RENDER`).

        Trace headers are left out if tracing is off, because the input processor then refuses them.
        """
        given = {name: stock[name] for name in _TO_RENDER if name in stock}
        if self.observability_config.otlp_traces_endpoint is None:
            given.pop("trace_headers", None)
        return given

    def _prompt_text(self, prompt: Any, stock: dict[str, Any]) -> dict[str, Any]:
        """Return those arguments of `generate` that are for processing the outputs, and `prompt_text`."""
        rest = {name: value for name, value in stock.items() if name not in _TO_RENDER}
        return rest | {"prompt_text": extract_prompt_components(self.model_config, prompt)[0]}

    def _admit(self, request: EngineCoreRequest, ticket: Ticket, given: SamplingParams) -> Ticket:
        rendered = Rendered(
            prompt=request.prompt_token_ids or (), features=request.mm_features or (), scope=cache_scope(request)
        )
        ticket.scope = request.lora_request, request.cache_salt
        params = request.sampling_params
        takes_sampling = params is not None and self.plan.frontend().params_type == SAMPLING_PARAMS
        own = without_ends_of_text(params, given) if takes_sampling else None
        self.admission.admit(ticket, rendered, answers=1 if params is None else params.n, params=own)
        self.admission.refuse_unused(ticket)
        return ticket

    async def _answer(
        self, request: EngineCoreRequest, ticket: Ticket, stock: dict[str, Any]
    ) -> AsyncGenerator[Any, None]:
        if not ticket.forwarded:
            async with contextlib.aclosing(self._chunks(ticket, request.request_id)) as answer:
                async for chunk in answer:
                    yield chunk
            return
        key = self.admission.attach(ticket, request)
        try:
            assert request.sampling_params is not None
            frontend = super().generate(request, request.sampling_params, request.request_id, **stock)
            answer = frontend if ticket.sink is None else merged(frontend, chunks(ticket.sink))
            async with contextlib.aclosing(answer):
                async for item in answer:
                    yield item
        finally:
            self.admission.withdraw(key)
            # AsyncLLM changes request ids, and keeps the state of a request that was cancelled while it was sent.
            left = self.output_processor.abort_requests([request.request_id], internal=True)
            if left or ticket.sink is not None:
                await self.orchestrator.abort({*left, request.request_id})

    def start(self, rendered: Rendered, options: RequestOptions, request_id: str) -> AsyncGenerator[Any, None]:
        """Start a request that does not use the frontend; yield its `OutputChunk`s. Closing the generator aborts it.

        Raises:
            RequestError: the request cannot be served.
            StageUnavailable: a needed stage has no live replica.
            RequestFailed: a stage could not finish the request.
        """
        self._refuse_if_draining()
        ticket = self.admission.ticket(None, options)
        ticket.priority = self._priority(None)
        self.admission.admit(ticket, rendered)
        self.admission.refuse_unused(ticket)
        return self._in_time(self._chunks(ticket, request_id))

    async def _chunks(self, ticket: Ticket, external_id: str) -> AsyncGenerator[Any, None]:
        request_id, sink = f"{external_id}-{uuid.uuid4().hex[:8]}", ticket.sink
        if sink is None or ticket.forwarded:
            raise RequestFailed("the request needs the frontend, which has been given no prompt")
        try:
            await self.admission.start(ticket, request_id, external_id)
            async for item in chunks(sink):
                yield item
        finally:
            await self.orchestrator.abort([request_id])

    async def tokenize(self, text: str, *, special: bool = True) -> list[int]:
        """Return the token ids of a text, computed in the only thread that uses the tokenizer (it is not thread-safe).

        Args:
            special: convert markers of the chat format to special tokens; False: tokenize them as plain text.
        """
        encode = partial(self.renderer.get_tokenizer().encode, text, add_special_tokens=False)
        if not special:
            encode = partial(encode, split_special_tokens=True)
        ids: list[int] = await asyncio.get_running_loop().run_in_executor(self.renderer._executor, encode)
        return ids

    def _priority(self, given: int | None) -> int:
        """Return a request's priority: `given`, or that of the HTTP request.

        Raises:
            RequestError: the priority is not 0, but the frontend does not schedule by priority, or its absolute value
                is too large.
        """
        priority = given or PRIORITY.get()
        if priority and self.vllm_config.scheduler_config.policy != "priority":
            raise RequestError("priority: must be 0 without --scheduling-policy priority", parameter="priority")
        if abs(priority) > priorities.MOST:
            message = f"priority: must be {-priorities.MOST} to {priorities.MOST}"
            raise RequestError(message, parameter="priority")
        return priority

    def _refuse_if_draining(self) -> None:
        if self.draining:
            raise StageUnavailable("the server is shutting down")

    def _in_time(self, source: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
        limit = self.plan.config.timeouts.request_limit_s
        return source if limit is None else until(limit, source)

    def get_num_unfinished_requests(self) -> int:
        """Return vLLM's count, plus the number of requests that do not use the frontend."""
        return super().get_num_unfinished_requests() + self.orchestrator.count(frontend=False)

    async def notify_kv_transfer_request_rejected(self, *_: Any, **__: Any) -> None:
        """Do nothing. vLLM's server calls this with the KV cache that a client has set in a refused request."""

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """Abort requests in all stages."""
        given = (request_id,) if isinstance(request_id, str) else as_list(request_id)
        await self.orchestrator.abort(self.output_processor.abort_requests(given, internal))

    async def text_only(self, ticket: Ticket) -> None:
        """End all outputs of a ticket's request except its text, which the frontend continues.

        Not by the caller's id: several requests may have the same, which a client sets with `X-Request-Id`.
        """
        await self.orchestrator.text_only(ticket.request_ids)

    def shutdown(self, timeout: float | None = None) -> None:
        """Fail the requests in flight and close the connections. The processes of replicas continue to run.

        vLLM's server calls this from another thread. A second call does nothing.

        Args:
            timeout: seconds that requests in flight get to end first; new requests are refused meanwhile.
        """
        replica_connections, self._fleet_open = self._fleet_open, None
        if replica_connections is None:
            return
        if timeout and not replica_connections.loop.is_closed() and not _is_running(replica_connections.loop):
            asyncio.run_coroutine_threadsafe(self._drain(timeout), replica_connections.loop).result()
        if not replica_connections.loop.is_closed():
            if _is_running(replica_connections.loop):
                self._stop()
            else:
                replica_connections.loop.call_soon_threadsafe(self._stop)
        for replica in tuple(replica_connections.replicas.values()):  # the loop may remove one meanwhile
            replica.close(timeout)
        super().shutdown(timeout)


def _check_bad_words(params: Any) -> None:
    """Check the length of `bad_words`: vLLM tokenizes them in the event loop, which long ones would block.

    Raises:
        VLLMValidationError: `bad_words` has more than `MOST_BAD_CHARACTERS` characters in total.
    """
    given = sum(map(len, getattr(params, "bad_words", None) or ()))
    if given > MOST_BAD_CHARACTERS:
        message = f"bad_words: may have {MOST_BAD_CHARACTERS} characters together, got {given}"
        raise VLLMValidationError(message, parameter="bad_words")


def _check_kv_transfer(params: Any) -> None:
    """Check that the client has not set `kv_transfer_params`: a wrong value would crash an engine.

    Raises:
        VLLMValidationError: the field is set. Every handler of vLLM returns HTTP 400 for this error.
    """
    given = getattr(params, "extra_args", None)
    if given and given.get(KEY) is not None:
        message = f"{KEY}: replicas set it themselves; remove it"
        raise VLLMValidationError(message, parameter=KEY)


def _make_params(type_name: str, **values: Any) -> Any:
    return make_params(type_name, values)


def _not_about_engine_requests(record: logging.LogRecord) -> bool:
    """Log filter that drops vLLM's warning about an EngineCoreRequest as prompt: vLLM's input processor made it."""
    return not record.getMessage().startswith("Passing EngineCoreRequest to")


def _is_running(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False
