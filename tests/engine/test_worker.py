"""What the workers do besides the stock ones, as far as it can be told without an engine."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

from vllm_omni_ext.connectors.base import ConnectorConfig
from vllm_omni_ext.connectors.registry import connector
from vllm_omni_ext.engine import worker
from vllm_omni_ext.engine.edges import Taker
from vllm_omni_ext.engine.worker import FeedWorker


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
def test_without_cuda_graphs(v2: bool) -> None:
    flag = "_graphs_captured" if v2 else "keys_initialized"
    dispatcher = SimpleNamespace(**{flag: True})
    runner = SimpleNamespace(**{"cudagraph_manager" if v2 else "cudagraph_dispatcher": dispatcher})
    with pytest.raises(ZeroDivisionError), worker._without_cuda_graphs(runner):
        assert vars(dispatcher) == {flag: False}
        raise ZeroDivisionError
    assert vars(dispatcher) == {flag: True}


def test_the_flags_are_the_ones_dispatch_reads() -> None:
    assert "self._graphs_captured and" in inspect.getsource(CudaGraphManager.dispatch)
    assert "not self.keys_initialized" in inspect.getsource(CudagraphDispatcher.dispatch)


@pytest.fixture
def calls(feed: FeedWorker, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is called while the worker starts, in order."""
    noted: list[str] = []
    monkeypatch.setattr(worker._Worker, "load_model", lambda self, **given: noted.append("vLLM loads"))
    monkeypatch.setattr(worker._Worker, "compile_or_warm_up_model", lambda self: noted.append("vLLM warms up"))
    model = feed.model_runner.get_model()
    model.after_load = lambda: noted.append("memory")
    model.warm_up = lambda: noted.append("graphs")
    return noted


def test_memory_is_made_with_the_weights_and_graphs_come_last(feed: FeedWorker, calls: list[str]) -> None:
    """vLLM measures the memory for the KV cache between the two."""
    feed.load_model(load_dummy_weights=False)
    assert calls == ["vLLM loads", "memory"]
    feed.compile_or_warm_up_model()
    assert calls == ["vLLM loads", "memory", "vLLM warms up", "graphs"]


def test_a_model_without_a_warm_up_is_left_alone(feed: FeedWorker, calls: list[str]) -> None:
    del feed.model_runner.get_model().warm_up
    feed.compile_or_warm_up_model()
    assert calls == ["vLLM warms up"]
