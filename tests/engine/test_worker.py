"""What the workers do besides the stock ones, as far as it can be told without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_omni_ext.connectors.base import ConnectorConfig
from vllm_omni_ext.connectors.registry import connector
from vllm_omni_ext.engine import worker
from vllm_omni_ext.engine.edges import Taker
from vllm_omni_ext.engine.worker import FeedWorker, LeanWorker


class Model:
    """Notes the steps it is told about."""

    def __init__(self) -> None:
        self.steps: list[list[str]] = []
        self.feeder = SimpleNamespace()

    def begin_step(self, *, rows: Any, opened: list[str]) -> None:
        self.steps.append(opened)

    def end_step(self) -> None:
        pass


@pytest.fixture
def feed(monkeypatch: pytest.MonkeyPatch) -> FeedWorker:
    monkeypatch.setattr(worker._Worker, "execute_model", lambda self, step: "executed")
    monkeypatch.setattr(worker._Worker, "sample_tokens", lambda self, grammar: SimpleNamespace(req_ids=["warm"]))
    made = FeedWorker.__new__(FeedWorker)
    made._taker, made._refused = Taker("rows", connector(ConnectorConfig(name="in_process")), 0.1), {}
    model = Model()
    made.model_runner = SimpleNamespace(get_model=lambda: model, input_batch=SimpleNamespace(generators={}))
    return made


def test_warm_up_stays_stock(feed: FeedWorker) -> None:
    """vLLM warms kernels up with steps of its own making: no hand-over, requests the feeder never heard of."""
    assert feed.execute_model(SchedulerOutput.make_empty()) == "executed"
    assert feed.sample_tokens(None).req_ids == ["warm"]
    assert feed.model_runner.get_model().steps == []


def test_a_step_of_our_scheduler_is_fed(feed: FeedWorker) -> None:
    feed.execute_model(SchedulerOutput.make_empty())
    step = SchedulerOutput.make_empty()
    step.handoff = {}  # type: ignore[attr-defined]
    assert feed.execute_model(step) == "executed"
    assert feed.model_runner.get_model().steps == [[]]


@pytest.mark.parametrize("v2", [True, False])
def test_only_the_v1_runner_has_generators_to_spare(
    v2: bool, feed: FeedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Model Runner V2 has no `input_batch`, and draws from seeds that nothing has to turn back."""
    monkeypatch.setattr(worker.current_platform, "is_cpu", lambda: True)
    if v2:
        del feed.model_runner.input_batch
    assert LeanWorker.sample_tokens(feed, None).req_ids == ["warm"]
