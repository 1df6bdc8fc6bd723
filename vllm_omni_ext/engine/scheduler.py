"""Scheduler of a stage whose inputs arrive in chunks.

A chunk is a second ADD with a known request id (see `wire.handoff`). A request is computed as far as its input is
known: vLLM asks `_reserve_prefill_lookahead` about every request of a step. One whose next input is missing is held
with vLLM's own `next_decode_eligible_step`, and an engine in which everything is held reports no work, so that it
sleeps on its input queue until the next chunk, request or abort wakes it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs, FinishReason
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_omni_ext.engine.gate import Gate
from vllm_omni_ext.engine.report import ReportMixin
from vllm_omni_ext.pool.load import Load
from vllm_omni_ext.wire.handoff import chunk_of
from vllm_omni_ext.wire.parts import refused


class FeedMixin(ReportMixin):
    """Gates requests on their hand-over and passes chunks on to the worker with the step that uses them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._gates: dict[str, Gate] = {}
        self._chunks: dict[str, list[dict[str, Any]]] = {}
        self._parked: dict[str, Request] = {}
        super().__init__(*args, **kwargs)

    def load(self) -> Load:
        """Requests that are held count as waiting."""
        load = super().load()
        return replace(load, waiting=load.waiting + len(self._parked))

    def held_requests(self) -> Iterable[Request]:
        """Those still parked included."""
        return chain(super().held_requests(), self._parked.values())

    def take_request(self, request: Request) -> None:
        """Add a request, or hand a chunk to the request of the same id; chunks of ended requests are dropped."""
        payload, is_chunk = chunk_of(request.sampling_params.extra_args)
        if is_chunk:
            self._take_chunk(request.request_id, payload)
            return
        self._gates[request.request_id] = gate = Gate.of(payload, request.num_prompt_tokens)
        if gate.limit() == 0:
            self._parked[request.request_id] = request
        else:
            super().take_request(request)

    def _take_chunk(self, req_id: str, payload: dict[str, Any]) -> None:
        gate = self._gates.get(req_id)
        if gate is None:  # ended meanwhile: the sender learns it from the request's last output
            return
        gate.take(payload)
        self._chunks.setdefault(req_id, []).append(payload)
        if req_id in self._parked and gate.limit() != 0:
            super().take_request(self._parked.pop(req_id))

    def _starved(self, request: Request) -> bool:
        gate = self._gates.get(request.request_id)
        limit = None if gate is None else gate.limit()
        return limit is not None and request.num_computed_tokens >= limit

    def _reserve_prefill_lookahead(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        count = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        gate = self._gates.get(request.request_id)
        limit = None if gate is None else gate.limit()
        return count if limit is None else max(0, min(count, limit - num_computed_tokens))

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Schedule one step; starved requests are not eligible for it."""
        for request in self.running:
            if self._starved(request):
                request.next_decode_eligible_step = max(request.next_decode_eligible_step, self.current_step + 2)
        output = super().schedule(throttle_prefills)
        due = [req_id for req_id in output.num_scheduled_tokens if req_id in self._chunks]
        output.handoff = {req_id: self._chunks.pop(req_id) for req_id in due}  # type: ignore[attr-defined]
        return output

    def has_requests(self) -> bool:
        """False while every request waits for a chunk, so that the engine sleeps."""
        if not super().has_requests():
            return False
        if self.pause_state is PauseState.PAUSED_NEW:  # a pause waits for these to end, then their cache may go
            return True
        if self.has_finished_requests() or len(self.waiting) or len(self.kv_holding_waiting):
            return True
        return any(not self._starved(request) for request in self.running)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """As vLLM's; a request that the worker has refused ends with an error, and the reason beside it."""
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for each in chain.from_iterable(group.outputs for group in outputs.values()):
            if each.pooling_output is not None and refused(each.pooling_output) is not None:
                self.finish_requests(each.request_id, RequestStatus.FINISHED_ERROR)
                each.finish_reason = FinishReason.ERROR
        return outputs

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> Any:
        """End requests, those still parked included; returns those that have ended, whose clients vLLM may tell."""
        if isinstance(request_ids, str):
            request_ids = [request_ids]
        known = list(self._gates) if request_ids is None else list(request_ids)
        parked = [self._parked.pop(req_id) for req_id in known if req_id in self._parked]
        for request in parked:
            request.status = finished_status
            self._forget(request.request_id)
        return [*parked, *super().finish_requests(None if request_ids is None else known, finished_status)]

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._forget(request.request_id)
        return super()._free_request(request, *args, **kwargs)

    def _forget(self, req_id: str) -> None:
        self._gates.pop(req_id, None)
        self._chunks.pop(req_id, None)


class FeedScheduler(FeedMixin):
    """For engines without async scheduling (CPU)."""


class FeedAsyncScheduler(FeedMixin, AsyncScheduler):
    """For engines with async scheduling."""


def feed_scheduler(**kwargs: Any) -> Scheduler:
    """Build the scheduler that fits `vllm_config`; vLLM calls `scheduler_cls` with keywords only."""
    cls = FeedAsyncScheduler if kwargs["vllm_config"].scheduler_config.async_scheduling else FeedScheduler
    return cls(**kwargs)
