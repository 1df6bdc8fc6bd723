"""What the scheduler of a stage that accepts chunks answers when vLLM pauses an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from vllm_omni_ext.engine.input_progress import InputProgress
from vllm_omni_ext.engine.scheduler import StreamingInput
from vllm_omni_ext.wire.stage_input import StageInput


def scheduler(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A scheduler with one request that waits for hidden states, and nothing else."""
    monkeypatch.setattr(Scheduler, "has_requests", lambda self: bool(self.running))
    made: Any = StreamingInput.__new__(StreamingInput)
    made.requests, made.running, made.waiting, made.kv_holding_waiting = {}, [], [], []
    made.finished_req_ids, made.connector = set(), None
    made._pause_state = PauseState.UNPAUSED
    made._chunks = {}
    made._progress = {"parked": InputProgress.of(StageInput(hidden_spans=((0, 5),), last=False), 9)}
    made._parked = {"parked": SimpleNamespace(request_id="parked", client_index=0, status=RequestStatus.WAITING)}
    return made


@pytest.mark.parametrize("given", [None, "parked", ["parked", "unknown"]], ids=str)
def test_a_request_aborted_while_it_waits_for_hidden_states_is_reported(
    monkeypatch: pytest.MonkeyPatch, given: Any
) -> None:
    made = scheduler(monkeypatch)
    ended = made.finish_requests(given, RequestStatus.FINISHED_ABORTED)
    assert [(request.request_id, request.status) for request in ended] == [("parked", RequestStatus.FINISHED_ABORTED)]
    assert not made._parked and not made._progress
    assert made.finish_requests(given, RequestStatus.FINISHED_ABORTED) == []


def test_a_pause_waits_for_requests_that_wait_for_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    made = scheduler(monkeypatch)
    made.running = [
        SimpleNamespace(
            request_id="starved",
            num_computed_tokens=18,
        )
    ]
    made._progress["starved"] = InputProgress.of(StageInput(step_inputs=1, last=False), 9)
    assert not made.has_requests(), "the engine sleeps until the chunk is there"
    made._pause_state = PauseState.PAUSED_NEW
    assert made.has_requests()
