"""Hidden states of a request that is aborted while its step runs are freed by the worker with the next step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_omni_ext.engine.orphaned_exports import OrphanedExports
from vllm_omni_ext.wire.envelope import HiddenStatesChunkReady, StageProgress, pack


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Any:
    """With a request that goes on and one that has ended, but is known still; vLLM's part does nothing."""
    monkeypatch.setattr(Scheduler, "update_from_output", lambda self, step, results: results)
    monkeypatch.setattr(Scheduler, "schedule", lambda self, throttle_prefills: SimpleNamespace())
    monkeypatch.setattr(Scheduler, "has_requests", lambda self: False)
    made: Any = OrphanedExports.__new__(OrphanedExports)
    made._orphaned = []
    made.requests = {
        "goes on": SimpleNamespace(is_finished=lambda: False),
        "ended": SimpleNamespace(is_finished=lambda: True),
    }
    return made


def message(name: str) -> torch.Tensor:
    return pack(HiddenStatesChunkReady(source="s", name=name, first=0, count=1))


def results(*req_ids: str, tensors: list[Any] | None) -> Any:
    return SimpleNamespace(req_ids=list(req_ids), pooler_output=tensors)


def test_exports_whose_message_is_dropped_are_named_once(scheduler: Any) -> None:
    tensors = [message("a"), message("b"), message("c"), None]
    scheduler.update_from_output(None, results("goes on", "ended", "gone", "ended", tensors=tensors))
    assert scheduler.has_requests(), "there is a step for it, whatever else there is"
    assert scheduler.schedule().orphaned == ["b", "c"]
    assert scheduler.schedule().orphaned == [] and not scheduler.has_requests()


@pytest.mark.parametrize(
    "tensors", [None, [], [None, None], [None, pack(StageProgress(1, 2))], [None, torch.zeros(3)]], ids=str
)
def test_steps_without_exports_name_nothing(scheduler: Any, tensors: list[Any] | None) -> None:
    scheduler.update_from_output(None, results("goes on", "ended", tensors=tensors))
    assert scheduler.schedule().orphaned == []
