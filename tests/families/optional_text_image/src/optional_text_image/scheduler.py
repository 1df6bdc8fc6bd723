"""A scheduler that has nothing of vLLM's but the interface: one request at a time, step by step until its end."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.v1.core.sched.interface import PauseState, SchedulerInterface
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_omni_ext.wire.envelope import StageError, unpack


class OneAtATime(SchedulerInterface):
    """Each step is one step of the oldest request."""

    def __init__(self, **_: Any) -> None:
        self.connector = self.ec_connector = None  # the engine reads both
        self.requests: dict[str, Request] = {}
        self._begun = ""
        self._ended: set[str] = set()
        self._pause = PauseState.UNPAUSED

    def add_request(self, request: Request) -> None:
        """Take a request."""
        self.requests[request.request_id] = request

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Schedule one step of the oldest request."""
        oldest = next(iter(self.requests.values()), None) if self.get_num_unfinished_requests() else None
        new = [] if oldest is None or oldest.request_id == self._begun else [NewRequestData.from_request(oldest, ())]
        due = {} if oldest is None else {oldest.request_id: 1}
        if oldest is not None:
            self._begun = oldest.request_id
        ended, self._ended = self._ended, set()
        cached = CachedRequestData.make_empty()
        if due and not new:
            cached.req_ids, cached.new_token_ids, cached.new_block_ids = [self._begun], [[]], [None]
            cached.num_computed_tokens, cached.num_output_tokens = [0], [0]
        return SchedulerOutput(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=due,
            total_num_scheduled_tokens=len(due),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            num_common_prefix_blocks=[],
            finished_req_ids=ended,
            free_encoder_mm_hashes=[],
        )

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Return the outputs of the step; the worker reports the end of a request with a token 0."""
        made: dict[int, EngineCoreOutputs] = {}
        out = model_runner_output
        for req_id, tokens, tensor in zip(out.req_ids, out.sampled_token_ids, out.pooler_output or (), strict=True):
            request = self.requests.get(req_id)
            if request is None:  # aborted meanwhile
                continue
            finish = None
            if tokens:
                finish = FinishReason.ERROR if isinstance(unpack(tensor), StageError) else FinishReason.STOP
                self.finish_requests(req_id, RequestStatus.FINISHED_STOPPED)
            output = EngineCoreOutput(req_id, [], pooling_output=tensor, finish_reason=finish)
            made[request.client_index] = EngineCoreOutputs(outputs=[output])
        return made

    def has_request(self, request_id: str) -> bool:
        """Return whether the request has not ended."""
        return request_id in self.requests

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        """End these requests; unknown ones have ended before."""
        if request_ids is None:
            request_ids = list(self.requests)
        names = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        ended = [self.requests.pop(req_id) for req_id in names if req_id in self.requests]
        for request in ended:
            request.status = finished_status
            self._ended.add(request.request_id)
        return ended

    def get_num_unfinished_requests(self) -> int:
        """Return the number of requests that a step can run."""
        if self._pause is PauseState.UNPAUSED:
            return len(self.requests)
        return int(self._pause is PauseState.PAUSED_NEW and self._begun in self.requests)

    def has_finished_requests(self) -> bool:
        """Whether ended requests have to be sent to the worker."""
        return bool(self._ended)

    def get_request_counts(self) -> tuple[int, int]:
        """Return (running, waiting)."""
        running = int(self._begun in self.requests)
        return running, len(self.requests) - running

    @property
    def pause_state(self) -> PauseState:
        """Whether steps are held back."""
        return self._pause

    def set_pause_state(self, pause_state: PauseState) -> None:
        """Hold steps back, or go on."""
        self._pause = pause_state

    def make_stats(self) -> None:
        """There are none."""

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """There is none."""
        return True

    def reset_encoder_cache(self) -> None:
        """There is none."""

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> None:
        """There are no grammars."""

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """There are no draft tokens."""

    def update_draft_token_ids_in_output(self, draft_token_ids: Any, scheduler_output: SchedulerOutput) -> None:
        """There are no draft tokens."""

    def shutdown(self) -> None:
        """Nothing is held."""
