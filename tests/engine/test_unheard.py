"""Rows of a request that is aborted while its step runs: the notice is dropped, so the worker is told to free them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_omni_ext.engine.unheard import UnheardScheduler
from vllm_omni_ext.wire.rows import Notice


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Any:
    """With a request that goes on and one that has ended, but is known still; vLLM's part does nothing."""
    monkeypatch.setattr(Scheduler, "update_from_output", lambda self, step, results: results)
    monkeypatch.setattr(Scheduler, "schedule", lambda self, throttle_prefills: SimpleNamespace())
    monkeypatch.setattr(Scheduler, "has_requests", lambda self: False)
    made: Any = UnheardScheduler.__new__(UnheardScheduler)
    made._unheard = []
    made.requests = {
        "goes on": SimpleNamespace(is_finished=lambda: False),
        "ended": SimpleNamespace(is_finished=lambda: True),
    }
    return made


def notice(name: str) -> torch.Tensor:
    return Notice(source="s", name=name, first=0, count=1).tensor()


def results(*req_ids: str, tensors: list[Any] | None) -> Any:
    return SimpleNamespace(req_ids=list(req_ids), pooler_output=tensors)


def test_those_whose_notice_is_dropped_are_told_once(scheduler: Any) -> None:
    tensors = [notice("a"), notice("b"), notice("c"), None]
    scheduler.update_from_output(None, results("goes on", "ended", "gone", "ended", tensors=tensors))
    assert scheduler.has_requests(), "there is a step for it, whatever else there is"
    assert scheduler.schedule().unheard == ["b", "c"]
    assert scheduler.schedule().unheard == [] and not scheduler.has_requests()


@pytest.mark.parametrize("tensors", [None, [], [None, None]], ids=str)
def test_steps_without_rows_tell_nothing(scheduler: Any, tensors: list[Any] | None) -> None:
    scheduler.update_from_output(None, results("goes on", "ended", tensors=tensors))
    assert scheduler.schedule().unheard == []
