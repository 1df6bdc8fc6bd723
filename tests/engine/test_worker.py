"""What the workers do besides the stock ones, as far as it can be told without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CompilationMode, CUDAGraphMode
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_omni_ext.connectors.base import ConnectorConfig
from vllm_omni_ext.connectors.registry import connector
from vllm_omni_ext.engine import worker
from vllm_omni_ext.engine.edges import Taker
from vllm_omni_ext.engine.worker import ExportWorker, FeedWorker, LeanWorker


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
    made.rank, made.vllm_config = 1, SimpleNamespace(load_config=None)  # the first rank's worker reports on loading
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


@pytest.mark.parametrize("v2", [True, False])
def test_a_model_is_loaded_under_a_name_of_its_own_and_prepared_before_it_runs(
    v2: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's cache of compiled code is keyed by its configuration: a stock engine must not find code with our layer."""
    export = ExportWorker.__new__(ExportWorker)
    export.rank = 1  # the first rank's worker reports on loading
    export.vllm_config = SimpleNamespace(
        load_config=None,
        additional_config={"of": "others"},
        model_config=SimpleNamespace(hf_config=SimpleNamespace(talker_config=SimpleNamespace(accept_hidden_layer=24))),
        compilation_config=SimpleNamespace(mode=CompilationMode.VLLM_COMPILE, cudagraph_mode=CUDAGraphMode.NONE),
        speculative_config=None,
    )
    keyed: list[Any] = []
    layers: list[Any] = []
    model = SimpleNamespace(
        get_language_model=lambda: SimpleNamespace(aux_hidden_state_layers=()),
        set_aux_hidden_state_layers=layers.append,
    )
    encoder = {"model_state": SimpleNamespace(execute_mm_encoder="stock")} if v2 else {"_execute_mm_encoder": "stock"}
    export.model_runner = SimpleNamespace(get_model=lambda: model, use_aux_hidden_state_outputs=False, **encoder)
    monkeypatch.setattr(
        worker._Worker, "load_model", lambda self, **_: keyed.append(self.vllm_config.additional_config)
    )
    export.load_model()
    assert keyed == [{"of": "others", "exported_layer": 24}]
    assert layers == [(24,)] and export.model_runner.use_aux_hidden_state_outputs
    runner = export.model_runner
    assert (runner.model_state.execute_mm_encoder if v2 else runner._execute_mm_encoder) != "stock"


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
