"""Steps and the start of a stage's workers, without an engine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import msgspec
import pytest
import torch
from vllm.config import CompilationMode, CUDAGraphMode
from vllm.model_executor.models import qwen3_omni_moe_thinker
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_omni_ext.engine import worker
from vllm_omni_ext.engine.edge_receiver import Lost
from vllm_omni_ext.engine.input_provider import Ended
from vllm_omni_ext.engine.worker import HiddenStatesExportWorker, StageWorker, StreamingInputWorker
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.model_plugins.qwen3_omni.thinker_worker import ThinkerWorker
from vllm_omni_ext.model_plugins.qwen_omni.own_sounds import CHECK
from vllm_omni_ext.wire.envelope import StageError, unpack
from vllm_omni_ext.wire.stage_input import INPUT, StageInput


class Message(msgspec.Struct, frozen=True):
    """A plugin's message."""

    ids: list[int]


@pytest.fixture
def feed(monkeypatch: pytest.MonkeyPatch) -> StreamingInputWorker:
    monkeypatch.setattr(worker._Worker, "execute_model", lambda self, step: "executed")
    monkeypatch.setattr(worker._Worker, "sample_tokens", lambda self, grammar: SimpleNamespace(req_ids=["warm"]))
    made = StreamingInputWorker.__new__(StreamingInputWorker)
    made.rank, made.vllm_config = 1, SimpleNamespace(load_config=None)  # the first rank's worker reports on loading
    made._receiving, made._errors = None, {}
    provider = Mock(payloads=Message, sampled=lambda req_ids, tokens, hidden: [None] * len(req_ids))
    model = Mock(spec=["input_provider", "begin_step", "end_step"], input_provider=provider)
    made.model_runner = SimpleNamespace(get_model=lambda: model, input_batch=SimpleNamespace(generators={}))
    return made


def test_only_steps_of_our_scheduler_reach_the_input_provider(feed: StreamingInputWorker) -> None:
    """vLLM warms kernels up with steps and requests of its own."""
    assert feed.execute_model(SchedulerOutput.make_empty()) == "executed"
    assert feed.sample_tokens(None).req_ids == ["warm"]
    model = feed.model_runner.get_model()
    model.begin_step.assert_not_called()
    assert feed.execute_model(step({})) == "executed"
    assert model.begin_step.call_args.kwargs["opened"] == []


def step(chunks: dict[str, list[StageInput]], **opened: StageInput) -> Any:
    made: Any = SchedulerOutput.make_empty()
    made.chunks = chunks
    made.scheduled_new_reqs = [
        SimpleNamespace(req_id=name, sampling_params=SamplingParams(extra_args={INPUT: msgspec.to_builtins(given)}))
        for name, given in opened.items()
    ]
    made.num_scheduled_tokens = dict.fromkeys({*opened, *chunks}, 1)
    made.arrived = {}
    return made


def test_the_input_provider_receives_messages_of_its_own_type(feed: StreamingInputWorker) -> None:
    provider = feed.model_runner.get_model().input_provider
    feed.execute_model(step({}, r=StageInput(payload=Message([1]), hidden_spans=((0, 2),))))
    feed.execute_model(step({"r": [StageInput(payload={"ids": [2]}), StageInput(step_inputs=1)]}))
    assert [each.args[:-1] for each in provider.open.mock_calls] == [("r", Message([1]), ((0, 2),))]
    assert provider.extend.mock_calls == [call("r", Message([2]))]


def test_a_request_whose_hidden_states_are_lost_ends_with_an_error(
    feed: StreamingInputWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = feed.model_runner.get_model().input_provider
    assert feed.hidden_states_open() is None
    first, states = step({}, r=StageInput(hidden_spans=((0, 2),))), torch.ones(1, 3)
    first.arrived = {"r": [states, Lost("the producer is gone")]}
    feed.execute_model(first)
    provider.add_hidden_states.assert_called_once_with("r", states)
    provider.blank.assert_called_once_with("r")
    assert feed.hidden_states_open() == 1
    sampled = SimpleNamespace(req_ids=["r"], sampled_token_ids=[[]], pooler_output=None)
    monkeypatch.setattr(worker._Worker, "sample_tokens", lambda self, grammar: sampled)
    feed.model_runner.get_model().sampled_hidden = torch.zeros(1, 1)
    assert [unpack(each) for each in feed.sample_tokens(None).pooler_output] == [StageError("the producer is gone")]
    ended = step({})
    ended.finished_req_ids = {"r"}
    feed.execute_model(ended)
    provider.close.assert_called_once_with("r")
    assert not feed._errors and feed.hidden_states_open() == 0


def test_the_output_names_the_requests_that_the_input_provider_ends(
    feed: StreamingInputWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, frame = feed.model_runner.get_model(), torch.ones(2)
    feed.execute_model(step({}))
    made = [Ended(frame), Ended(), frame, None]
    monkeypatch.setattr(model.input_provider, "sampled", lambda req_ids, tokens, hidden: made)
    sampled = SimpleNamespace(req_ids=list("abcd"), sampled_token_ids=[[1]] * 4, pooler_output=None)
    monkeypatch.setattr(worker._Worker, "sample_tokens", lambda self, grammar: sampled)
    model.sampled_hidden = torch.zeros(4, 1)
    out = feed.sample_tokens(None)
    assert out.ended == ["a", "b"]
    assert out.pooler_output == [frame, None, frame, None]


def test_a_stage_that_exports_needs_the_layer() -> None:
    export = HiddenStatesExportWorker.__new__(HiddenStatesExportWorker)
    export.vllm_config = SimpleNamespace(additional_config={})
    with pytest.raises(ConfigError, match=r"additional_config\.exported_layer"):
        export.layer_to_export()
    export.vllm_config.additional_config = {"exported_layer": 3}
    assert export.layer_to_export() == 3


@pytest.mark.parametrize("v2", [True, False])
def test_both_model_runners_can_sample(v2: bool, feed: StreamingInputWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Model Runner V2 has no `input_batch` and no generators to keep from drawing."""
    monkeypatch.setattr(worker.current_platform, "is_cpu", lambda: True)
    if v2:
        del feed.model_runner.input_batch
    assert StageWorker.sample_tokens(feed, None).req_ids == ["warm"]


@pytest.mark.parametrize("v2", [True, False])
def test_the_exported_layer_is_set_before_the_model_runs(v2: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's cache of compiled code is keyed by its configuration: a stock engine must not find code with our layer."""
    export = ThinkerWorker.__new__(ThinkerWorker)
    export.rank = 1  # the first rank's worker reports on loading
    thinker = SimpleNamespace(position_id_per_seconds=13, vision_config=SimpleNamespace(spatial_merge_size=2))
    config = SimpleNamespace(talker_config=SimpleNamespace(accept_hidden_layer=24), thinker_config=thinker)
    monkeypatch.setattr(qwen3_omni_moe_thinker, CHECK, None)  # the worker replaces it
    export.vllm_config = SimpleNamespace(
        load_config=None,
        additional_config={"of": "others"},
        model_config=SimpleNamespace(hf_config=config),
        compilation_config=SimpleNamespace(mode=CompilationMode.VLLM_COMPILE, cudagraph_mode=CUDAGraphMode.NONE),
        speculative_config=None,
    )
    keyed: list[Any] = []
    layers: list[Any] = []
    model = SimpleNamespace(
        get_language_model=lambda: SimpleNamespace(aux_hidden_state_layers=()),
        set_aux_hidden_state_layers=layers.append,
        get_mrope_input_positions="stock",
        audio_tower=torch.nn.Identity(),
    )
    v2_encoder = {"model_state": SimpleNamespace(execute_mm_encoder="stock"), "encoder_cache": Mock()}
    encoder = v2_encoder if v2 else {"_execute_mm_encoder": "stock"}
    export.model_runner = SimpleNamespace(get_model=lambda: model, use_aux_hidden_state_outputs=False, **encoder)
    monkeypatch.setattr(
        worker._Worker, "load_model", lambda self, **_: keyed.append(self.vllm_config.additional_config)
    )
    export.load_model()
    assert keyed == [{"of": "others", "exported_layer": 24}]
    assert layers == [(24,)] and export.model_runner.use_aux_hidden_state_outputs
    runner = export.model_runner
    assert (runner.model_state.execute_mm_encoder if v2 else runner._execute_mm_encoder) != "stock"
    assert model.get_mrope_input_positions != "stock"


def test_lasting_memory_is_allocated_with_the_weights_and_graphs_come_last(
    feed: StreamingInputWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM measures the memory for the KV cache between the two."""
    calls: list[str] = []
    monkeypatch.setattr(worker._Worker, "load_model", lambda self, **given: calls.append("vLLM loads"))
    monkeypatch.setattr(worker._Worker, "compile_or_warm_up_model", lambda self: calls.append("vLLM warms up"))
    model = feed.model_runner.get_model()
    model.after_load = lambda: calls.append("memory")
    feed.load_model(load_dummy_weights=False)
    assert calls == ["vLLM loads", "memory"]
    feed.compile_or_warm_up_model()
    model.warm_up = lambda: calls.append("graphs")
    feed.compile_or_warm_up_model()
    assert calls[2:] == ["vLLM warms up", "vLLM warms up", "graphs"]


def test_only_shared_memory_of_own_groups_is_unlinked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of other groups may not have mapped theirs yet."""
    monkeypatch.setattr(worker, "SHARED", str(tmp_path))
    gone = ["vllm_dist_a-tp:0-[0-1]-cpushm_0", "vllm_dist_a-tp:0-[0-1]-cpushm_1", "vllm_dist_a-pp:0-[1]-cpushm_0"]
    stay = ["vllm_dist_a-tp:0-[2-11]-cpushm_0", "vllm_dist_b-tp:0-[0-1]-cpushm_0", "psm_1"]
    for name in gone + stay:
        (tmp_path / name).touch()
    worker._unlink_queues("vllm_dist_a", 1)
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(stay)
