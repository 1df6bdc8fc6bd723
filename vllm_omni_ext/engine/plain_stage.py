"""Scheduler, worker and model interface of a stage that is no language model: a step computes all running requests.

A model plugin names `PlainScheduler` and `PlainWorker` in the `engine` of its `StageSpec`, with
`async_scheduling: False` and `enforce_eager: True`, and writes a `PlainModel`, which vLLM's loader builds and loads. A
step is the work between two points at which requests may begin or be aborted, e.g. one denoise step.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec
import torch
from torch import nn
from vllm.model_executor.models.interfaces import IsAttentionFree
from vllm.v1.core.sched.interface import PauseState, SchedulerInterface
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.worker.worker_base import CompilationTimes

from vllm_omni_ext.engine.worker import StageWorker
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.memory import malloc_trim
from vllm_omni_ext.wire.envelope import Message, StageError, pack, unpack
from vllm_omni_ext.wire.priorities import of_request
from vllm_omni_ext.wire.stage_input import END, PART, PartHeader, StageInput

_LAST = -1
"""Appended to the token ids that `PlainWorker` returns for an answer that ends its request; `PlainScheduler` removes
it."""


@dataclass(frozen=True, kw_only=True)
class PlainRequest:
    """One request of a plain stage, as the plugin's flow (`plugins.flow.Flow`) has sent it.

    Attributes:
        req_id: the engine's id of the request.
        prompt: token ids; may be empty.
        payload: the flow's message, converted to `PlainModel.payloads`; None if there is none.
        params: vLLM's `SamplingParams`, or the stage's own parameters, converted to `PlainModel.params`.
        features: vLLM `MultiModalFeatureSpec`s of the prompt.
        part: header with stream name and number, if the request is one part of a stream (`plugins.flow.Submit`); else
            None.
        waited: seconds that the request waited in the scheduler's queue.
    """

    req_id: str
    prompt: Sequence[int]
    payload: Any
    params: Any
    features: Sequence[Any] = ()
    part: PartHeader | None = None
    waited: float = 0.0


@dataclass(frozen=True)
class Answer:
    """The output of one step for one request.

    Attributes:
        output: a tensor on the CPU, a message of `wire.envelope`, or None if the step has no output for the request.
        last: the request ends with this answer. An `output` of type `StageError` ends the request in any case.
        tokens: generated token ids. As in any vLLM engine, a stop token or the length limit ends the request. Tokens
            after that end are dropped.
    """

    output: torch.Tensor | Message | None
    last: bool = False
    tokens: Sequence[int] = ()


class StreamLost(ValueError):
    """The state of the stream to which a part belongs was dropped. The stream is sent again, from its part 0."""


class PlainModel(nn.Module, IsAttentionFree):
    """Base class of the models of plain stages: stages without attention, KV cache and sampling.

    As in every vLLM model, the constructor takes `vllm_config` and `prefix`, and a subclass defines `load_weights`.
    """

    payloads: ClassVar[Any] = Any
    """Type to which the flow's messages are converted: a `msgspec.Struct`, or a union of tagged structs."""

    params: ClassVar[Any] = None
    """The `msgspec.Struct` of the stage's own parameters; None: requests have vLLM's `SamplingParams`."""

    def open(self, request: PlainRequest) -> None:
        """Begin a request; called once, before its first step.

        Raises:
            ValueError: the request cannot be served; the client receives the message.
            StreamLost: the model has dropped the stream of the part, e.g. as no part came for too long.
        """
        raise NotImplementedError

    def step(self, req_ids: Sequence[str]) -> Mapping[str, Answer]:
        """Compute one step of these requests; return answers by request id. A request may have no answer in a step."""
        raise NotImplementedError

    def close(self, req_id: str) -> None:
        """Free the state of a request that has ended or was aborted. Unknown ids are ignored."""

    def forget(self, stream: str) -> None:
        """Free the state of a stream that stops before its last part, e.g. by an abort. Unknown names are ignored."""

    def warm_up(self) -> None:
        """Compile kernels, so that the first request is not delayed; called once, after loading."""

    @staticmethod
    def get_model_state_cls() -> type:
        """Return vLLM's default model state; Model Runner V2 would choose that of Mamba for an attention-free model."""
        from vllm.v1.worker.gpu.model_states.default import DefaultModelState

        return DefaultModelState

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Part of vLLM's model interface; never called."""
        raise NotImplementedError

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        raise NotImplementedError


class PlainWorker(StageWorker):
    """Runs a `PlainModel` in place of vLLM's model runner."""

    def compile_or_warm_up_model(self) -> CompilationTimes:
        self.model_runner.get_model().warm_up()
        malloc_trim()
        return CompilationTimes(language_model=0.0, encoder=0.0)

    def get_supported_tasks(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("generate",)

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        model: PlainModel = self.model_runner.get_model()
        for req_id in scheduler_output.finished_req_ids:
            model.close(req_id)
        answers: dict[str, Answer] = {}
        waited = getattr(scheduler_output, "waited", {})
        for new in scheduler_output.scheduled_new_reqs:
            answer = _begin(model, new, waited.get(new.req_id, 0.0))
            if answer is not None:
                answers[new.req_id] = answer
        running = [req_id for req_id in scheduler_output.num_scheduled_tokens if req_id not in answers]
        if running:
            answers |= model.step(running)
        ids = [req_id for req_id in scheduler_output.num_scheduled_tokens if req_id in answers]
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={req_id: i for i, req_id in enumerate(ids)},
            sampled_token_ids=[_tokens(answers[req_id]) for req_id in ids],
            pooler_output=[_tensor(answers[req_id].output) for req_id in ids],
        )


def _begin(model: PlainModel, new: NewRequestData, waited: float) -> Answer | None:
    """Open a request in the model and return None.

    A request that only ends a stream, and an invalid request, need no step: their last answer is returned.
    """
    assert new.sampling_params is not None, "a plain stage takes sampling parameters"
    extra = new.sampling_params.extra_args or {}
    try:
        part = PartHeader.of(extra[PART]) if PART in extra else None
        if part is not None and part.part == END:
            model.forget(part.stream)
            return Answer(None, last=True)
        message = part or StageInput.of(extra)[0]
        own = model.params
        request = PlainRequest(
            req_id=new.req_id,
            prompt=() if part is not None and part.empty else new.prompt_token_ids or (),
            payload=None if message.payload is None else msgspec.convert(message.payload, model.payloads),
            params=new.sampling_params if own is None else msgspec.convert(message.params or {}, own),
            features=new.mm_features,
            part=part,
            waited=waited,
        )
        model.open(request)
    except (ValueError, msgspec.ValidationError) as error:
        return Answer(StageError(str(error), lost=isinstance(error, StreamLost)))
    return None


def _tokens(answer: Answer) -> list[int]:
    """Return the answer's tokens, and `_LAST` if the answer ends the request."""
    return [*answer.tokens, _LAST] if answer.last or _failed(answer.output) else [*answer.tokens]


def _tensor(output: torch.Tensor | Message | None) -> torch.Tensor | None:
    return output if output is None or isinstance(output, torch.Tensor) else pack(output)


def _failed(output: Any) -> bool:
    return isinstance(output, StageError)


@dataclass(frozen=True)
class _Entry:
    """A request in the scheduler, with its `PlainScheduler.costs`; queued at monotonic time `since` (seconds)."""

    request: Request
    costs: Mapping[str, float]
    since: float


class PlainScheduler(SchedulerInterface):
    """Schedules requests first come, first served: up to `max_num_seqs` run, and each step includes all running ones.

    A subclass that limits the memory or the step time of the running requests sets `limits` and overrides `costs`. The
    first waiting request waits until its costs fit. All later requests wait behind it.

    Attributes:
        limits: name of a resource -> the greatest sum of the running requests' costs.

    Raises:
        ConfigError: the engine has async scheduling, which would begin a step before the previous one has ended; or it
            is configured to transfer KV caches, which this scheduler does not have.
    """

    def __init__(self, vllm_config: Any, log_stats: bool = False, **_: Any) -> None:
        if vllm_config.scheduler_config.async_scheduling:
            raise ConfigError("async_scheduling: a stage with PlainScheduler needs false")
        if vllm_config.kv_transfer_config is not None:
            raise ConfigError("kv_transfer_config: a stage with PlainScheduler has no KV cache; remove prefill_decode")
        self.connector = self.ec_connector = None  # the engine reads both attributes
        self.limits: Mapping[str, float] = {}
        self._most: int = vllm_config.scheduler_config.max_num_seqs
        self._by_priority = vllm_config.scheduler_config.policy == "priority"
        self._model_config = vllm_config.model_config
        self._log_stats = log_stats
        self._waiting: dict[str, _Entry] = {}
        self._running: dict[str, _Entry] = {}
        self._refused: dict[str, tuple[Request, str]] = {}
        self._ended: set[str] = set()
        self._pause = PauseState.UNPAUSED

    def costs(self, request: Request) -> Mapping[str, float]:
        """Return a request's cost in each resource of `limits`; called once, when the request is queued.

        Raises:
            ValueError: the request cannot be served; the client receives the message.
        """
        return {}

    def add_request(self, request: Request) -> None:
        """Queue a request; reject it if `costs` raises, or if one of its costs exceeds the limit."""
        self._record(request, EngineCoreEventType.QUEUED)
        try:
            costs = self.costs(request)
            for name, cost in costs.items():
                if cost > self.limits[name]:
                    raise ValueError(f"the request needs {cost:,.0f} {name}, but the limit is {self.limits[name]:,.0f}")
        except ValueError as error:
            self._refused[request.request_id] = request, str(error)
        else:
            self._waiting[request.request_id] = _Entry(request, costs, time.monotonic())

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Start waiting requests while the limits allow it, then schedule one step of all running requests."""
        output, waited = SchedulerOutput.make_empty(), {}
        while self._pause is PauseState.UNPAUSED and self._waiting and self._has_room():
            req_id = self._next()
            entry = self._running[req_id] = self._waiting.pop(req_id)
            entry.request.status = RequestStatus.RUNNING
            self._record(entry.request, EngineCoreEventType.SCHEDULED)
            output.scheduled_new_reqs.append(NewRequestData.from_request(entry.request, ()))
            waited[req_id] = time.monotonic() - entry.since
        if self._pause is not PauseState.PAUSED_ALL:
            output.num_scheduled_tokens = dict.fromkeys(self._running, 1)
        output.total_num_scheduled_tokens = len(output.num_scheduled_tokens)
        output.finished_req_ids, self._ended = self._ended, set()
        vars(output)["waited"] = waited
        return output

    def _next(self) -> str:
        """Return the id of the waiting request that is started next.

        That is the oldest one; with the policy "priority", the oldest among those with the lowest priority value.
        """
        if not self._by_priority:
            return next(iter(self._waiting))
        return min(self._waiting, key=lambda req_id: of_request(self._waiting[req_id].request.priority))

    def _has_room(self) -> bool:
        """Return whether the next waiting request can run in addition to the running ones."""
        costs = self._waiting[self._next()].costs
        return len(self._running) < self._most and all(
            cost + sum(entry.costs.get(name, 0) for entry in self._running.values()) <= self.limits[name]
            for name, cost in costs.items()
        )

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        clients: dict[int, EngineCoreOutputs] = {}

        def add(request: Request, tokens: list[int], tensor: torch.Tensor | None) -> None:
            output = _output(request, tokens, tensor)
            clients.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(output)

        for request, reason in list(self._refused.values()):
            self.finish_requests(request.request_id, RequestStatus.FINISHED_ERROR)
            add(request, [], pack(StageError(reason)))
        answers = model_runner_output
        for req_id, tokens, tensor in zip(
            answers.req_ids, answers.sampled_token_ids, answers.pooler_output or (), strict=True
        ):
            if (entry := self._running.get(req_id)) is not None:  # else aborted meanwhile
                add(entry.request, self._advance(entry.request, tokens, tensor), tensor)
        stats = self.make_stats()
        if stats is not None:
            clients.setdefault(next(iter(clients), 0), EngineCoreOutputs()).scheduler_stats = stats
        return clients

    def _advance(self, request: Request, tokens: list[int], tensor: torch.Tensor | None) -> list[int]:
        """Append an answer's tokens to a request; end the request at a stop condition. Return the accepted tokens."""
        status, accepted = None, [token for token in tokens if token != _LAST]
        for number, token in enumerate(accepted, 1):
            request.append_output_token_ids(token)
            if check_stop(request, self._model_config.max_model_len):
                status, accepted = request.status, accepted[:number]
                break
        if status is None and tokens[-1:] == [_LAST]:
            failed = tensor is not None and _failed(unpack(tensor))
            status = RequestStatus.FINISHED_ERROR if failed else RequestStatus.FINISHED_STOPPED
        if status is not None:
            self.finish_requests(request.request_id, status)
        return accepted

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        """End the requests with these ids (None: all requests); return the requests that had not ended before."""
        if request_ids is None:
            request_ids = [*self._running, *self._waiting, *self._refused]
        names = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        ended = []
        for req_id in names:
            if req_id in self._running:
                self._ended.add(req_id)  # the worker has opened the request
            entry = self._running.pop(req_id, None) or self._waiting.pop(req_id, None)
            request = self._refused.pop(req_id, (None, ""))[0] if entry is None else entry.request
            if request is not None:
                request.status = finished_status
                ended.append(request)
        return ended

    def get_num_unfinished_requests(self) -> int:
        """Return how many requests the next step can work on, in the current pause state."""
        if self._pause is PauseState.PAUSED_ALL:
            return 0
        waiting = len(self._waiting) if self._pause is PauseState.UNPAUSED else 0
        return len(self._running) + len(self._refused) + waiting

    def has_request(self, request_id: str) -> bool:
        return request_id in self._running or request_id in self._waiting or request_id in self._refused

    def has_finished_requests(self) -> bool:
        """Return whether the next step must send the worker the ids of ended requests."""
        return bool(self._ended)

    def get_request_counts(self) -> tuple[int, int]:
        return len(self._running), len(self._waiting) + len(self._refused)

    @property
    def pause_state(self) -> PauseState:
        return self._pause

    def set_pause_state(self, pause_state: PauseState) -> None:
        self._pause = pause_state

    def make_stats(self) -> SchedulerStats | None:
        return SchedulerStats(*self.get_request_counts()) if self._log_stats else None

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        return True

    def reset_encoder_cache(self) -> None:
        """Do nothing: there is no encoder cache."""

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> None:
        """Return None: there are no grammars."""

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """Do nothing: there are no draft tokens."""

    def update_draft_token_ids_in_output(self, draft_token_ids: Any, scheduler_output: SchedulerOutput) -> None:
        """Do nothing: there are no draft tokens."""

    def shutdown(self) -> None:
        """Do nothing: the scheduler owns no resources."""

    def _record(self, request: Request, event: EngineCoreEventType) -> None:
        if self._log_stats:
            request.record_event(event, time.monotonic())


def _output(request: Request, tokens: list[int], tensor: torch.Tensor | None) -> EngineCoreOutput:
    """Return the output of one step for one request, as vLLM sends it to the API server.

    Args:
        request: its status gives the finish reason; a running request has none.
        tokens: new token ids.
        tensor: sent as `pooling_output`.
    """
    stats = request.take_prefill_stats() if tokens else None
    if stats is not None:
        stats.set(request.num_prompt_tokens, 0, 0)
    return EngineCoreOutput(
        request.request_id,
        tokens,
        pooling_output=tensor,
        finish_reason=RequestStatus.get_finished_reason(request.status),
        stop_reason=request.stop_reason,
        events=request.take_events(),
        trace_headers=request.trace_headers,
        prefill_stats=stats,
    )
