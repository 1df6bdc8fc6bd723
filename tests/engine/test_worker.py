"""What the workers do besides the stock ones, as far as it can be told without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from vllm.config import CompilationMode, CUDAGraphMode
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_omni_ext.connectors.base import ConnectorConfig
from vllm_omni_ext.connectors.registry import connector
from vllm_omni_ext.engine import worker
from vllm_omni_ext.engine.edges import EdgeReceiver, Lost
from vllm_omni_ext.engine.worker import HiddenStatesExportWorker, StageWorker, StreamingInputWorker
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.model_plugins.qwen3_omni.thinker_worker import ThinkerWorker
from vllm_omni_ext.wire.envelope import StageError, unpack
from vllm_omni_ext.wire.stage_input import INPUT, HiddenStatesRef, StageInput


class Message(msgspec.Struct, frozen=True):
    """A plugin's message."""

    ids: list[int]


class Provider:
    """Notes what it is given."""

    payloads = Message

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *given: self.calls.append((name, *given))

    def sampled(self, req_ids: Any, tokens: Any, hidden: Any) -> list[Any]:
        return [None] * len(req_ids)


class Model:
    """Notes the steps it is told about."""

    def __init__(self) -> None:
        self.steps: list[list[str]] = []
        self.input_provider: Any = Provider()

    def begin_step(self, *, rows: Any, opened: list[str]) -> None:
        self.steps.append(opened)

    def end_step(self) -> None:
        pass


@pytest.fixture
def feed(monkeypatch: pytest.MonkeyPatch) -> StreamingInputWorker:
    monkeypatch.setattr(worker._Worker, "execute_model", lambda self, step: "executed")
    monkeypatch.setattr(worker._Worker, "sample_tokens", lambda self, grammar: SimpleNamespace(req_ids=["warm"]))
    made = StreamingInputWorker.__new__(StreamingInputWorker)
    made.rank, made.vllm_config = 1, SimpleNamespace(load_config=None)  # the first rank's worker reports on loading
    in_process = connector(ConnectorConfig(name="tests.connectors.in_process:InProcess"))
    made._receiver, made._errors = EdgeReceiver("hidden_states", in_process, 0.1), {}
    model = Model()
    made.model_runner = SimpleNamespace(get_model=lambda: model, input_batch=SimpleNamespace(generators={}))
    return made


def test_warm_up_stays_stock(feed: StreamingInputWorker) -> None:
    """vLLM warms kernels up with steps of its own making: no hand-over, requests the input provider never heard of."""
    assert feed.execute_model(SchedulerOutput.make_empty()) == "executed"
    assert feed.sample_tokens(None).req_ids == ["warm"]
    assert feed.model_runner.get_model().steps == []


def test_a_step_of_our_scheduler_is_fed(feed: StreamingInputWorker) -> None:
    feed.execute_model(SchedulerOutput.make_empty())
    assert feed.execute_model(step({})) == "executed"
    assert feed.model_runner.get_model().steps == [[]]


def step(chunks: dict[str, list[StageInput]], **opened: StageInput) -> Any:
    made: Any = SchedulerOutput.make_empty()
    made.chunks = chunks
    made.scheduled_new_reqs = [
        SimpleNamespace(req_id=name, sampling_params=SamplingParams(extra_args={INPUT: msgspec.to_builtins(given)}))
        for name, given in opened.items()
    ]
    made.num_scheduled_tokens = dict.fromkeys({*opened, *chunks}, 1)
    return made


def sampled() -> Any:
    return SimpleNamespace(req_ids=["r"], sampled_token_ids=[[]], pooler_output=None)


def test_the_provider_gets_messages_of_its_own_type(feed: StreamingInputWorker) -> None:
    calls = feed.model_runner.get_model().input_provider.calls
    feed.execute_model(step({}, r=StageInput(payload=Message([1]), hidden_spans=((0, 2),))))
    feed.execute_model(step({"r": [StageInput(payload={"ids": [2]}), StageInput(step_inputs=1)]}))
    assert [each[:-1] for each in calls if each[0] == "open"] == [("open", "r", Message([1]), ((0, 2),))]
    assert [each for each in calls if each[0] == "extend"] == [("extend", "r", Message([2]))]


def test_a_request_whose_hidden_states_do_not_come_ends_with_an_error(
    feed: StreamingInputWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = feed.model_runner.get_model().input_provider.calls
    monkeypatch.setattr(feed._receiver, "take", lambda req_ids, lost_anywhere: {"r": Lost("the producer is gone")})
    feed.execute_model(step({}, r=StageInput(hidden_spans=((0, 2),))))
    assert calls[-1] == ("blank", "r")
    monkeypatch.setattr(worker._Worker, "sample_tokens", lambda self, grammar: sampled())
    feed.model_runner.get_model().sampled_hidden = torch.zeros(1, 1)
    assert [unpack(each) for each in feed.sample_tokens(None).pooler_output] == [StageError("the producer is gone")]
    monkeypatch.undo()
    monkeypatch.setattr(worker._Worker, "execute_model", lambda self, step: "executed")
    ended = step({})
    ended.finished_req_ids = {"r"}
    feed.execute_model(ended)
    assert calls[-1] == ("close", "r") and not feed._errors


def test_a_stage_without_a_tensor_edge_takes_chunks(feed: StreamingInputWorker) -> None:
    feed._receiver = None
    feed.execute_model(step({"r": [StageInput()]}, r=StageInput(last=False)))
    assert feed.hidden_states_open() is None
    ref = HiddenStatesRef(source="s", name="n", count=1)
    with pytest.raises(ConfigError, match="no tensor edge"):
        feed.execute_model(step({"r": [StageInput(hidden_states=ref)]}))


def test_a_stage_configures_the_exported_layer() -> None:
    export = HiddenStatesExportWorker.__new__(HiddenStatesExportWorker)
    export.vllm_config = SimpleNamespace(additional_config={"exported_layer": 3})
    assert export.layer_to_export() == 3
    export.vllm_config.additional_config = {}
    with pytest.raises(ConfigError, match=r"additional_config\.exported_layer"):
        export.layer_to_export()


@pytest.mark.parametrize("v2", [True, False])
def test_only_the_v1_runner_has_generators_to_spare(
    v2: bool, feed: StreamingInputWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Model Runner V2 has no `input_batch`, and draws from seeds that nothing has to turn back."""
    monkeypatch.setattr(worker.current_platform, "is_cpu", lambda: True)
    if v2:
        del feed.model_runner.input_batch
    assert StageWorker.sample_tokens(feed, None).req_ids == ["warm"]


@pytest.mark.parametrize("v2", [True, False])
def test_a_model_is_loaded_under_a_name_of_its_own_and_prepared_before_it_runs(
    v2: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's cache of compiled code is keyed by its configuration: a stock engine must not find code with our layer."""
    export = ThinkerWorker.__new__(ThinkerWorker)
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
def calls(feed: StreamingInputWorker, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is called while the worker starts, in order."""
    noted: list[str] = []
    monkeypatch.setattr(worker._Worker, "load_model", lambda self, **given: noted.append("vLLM loads"))
    monkeypatch.setattr(worker._Worker, "compile_or_warm_up_model", lambda self: noted.append("vLLM warms up"))
    model = feed.model_runner.get_model()
    model.after_load = lambda: noted.append("memory")
    model.warm_up = lambda: noted.append("graphs")
    return noted


def test_memory_is_made_with_the_weights_and_graphs_come_last(feed: StreamingInputWorker, calls: list[str]) -> None:
    """vLLM measures the memory for the KV cache between the two."""
    feed.load_model(load_dummy_weights=False)
    assert calls == ["vLLM loads", "memory"]
    feed.compile_or_warm_up_model()
    assert calls == ["vLLM loads", "memory", "vLLM warms up", "graphs"]


def test_a_model_without_a_warm_up_is_left_alone(feed: StreamingInputWorker, calls: list[str]) -> None:
    del feed.model_runner.get_model().warm_up
    feed.compile_or_warm_up_model()
    assert calls == ["vLLM warms up"]
