"""vLLM accepts the plan: the engine configuration of every stage, without starting an engine."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm.config import CompilationConfig, CompilationMode
from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding
from vllm.usage.usage_lib import UsageContext

from vllm_omni_ext.cli.settings import from_kwargs
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.runtime.launch.engine_args import any_replica_args, as_asked, stage_engine_args
from vllm_omni_ext.runtime.launch.hf_overrides import whole_config
from vllm_omni_ext.runtime.launch.inherit import register_classes
from vllm_omni_ext.runtime.launch.launcher import Deployment
from vllm_omni_ext.topology.machine import THREADS
from vllm_omni_ext.topology.plan import Plan


def changed(config: Any) -> Any:
    """Overrides in the form of a function."""
    if hasattr(config, "talker_config"):
        config.talker_config.accept_hidden_layer, config.tts_bos_token_id = 1, 5
    return config


@pytest.fixture(scope="module")
def plan(tiny: Path) -> Plan:
    return from_kwargs(str(tiny))


@pytest.mark.parametrize(
    ("stage", "architecture"),
    [
        ("thinker", "Qwen3OmniMoeForConditionalGeneration"),
        ("talker", "Qwen3OmniTalker"),
        ("code2wav", "Qwen3OmniCode2Wav"),
    ],
)
def test_the_plan_of_every_stage_is_a_configuration_of_vllm(
    plan: Plan, stage: str, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    register_classes("qwen3_omni")  # as the server does: else vLLM inspects each in a process of its own
    for name, value in plan.stage(stage).env.items():
        monkeypatch.setenv(name, value)
    config = stage_engine_args(plan, ReplicaId(stage, 0)).create_engine_config()
    said = plan.stage(stage).engine_args
    assert config.model_config.architectures == [architecture]
    assert config.cache_config.kv_cache_memory_bytes == said.get("kv_cache_memory_bytes")
    if plan.machine.platform == "cpu":
        assert config.parallel_config.distributed_executor_backend == "uni"
        assert str(config.model_config.dtype) == "torch.float32"
    if stage == "code2wav":
        assert config.scheduler_config.max_num_batched_tokens >= config.model_config.max_model_len


def test_replicas_on_different_devices_share_no_compiled_code(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    config = stage_engine_args(plan, ReplicaId("talker", 0)).create_engine_config()
    hashes = set()
    for devices in ((0,), (1,), (0, 1)):
        config.additional_config = any_replica_args(plan, "talker", devices=devices).additional_config
        hashes.add(config.compute_hash())
    assert len(hashes) == 3


@pytest.mark.parametrize("said", [None, {"mode": 3}, CompilationConfig(mode=CompilationMode.VLLM_COMPILE)], ids=str)
def test_the_thinkers_rotary_embedding_is_vllms_own_kernel(plan: Plan, said: object) -> None:
    """In compiled code too: there vLLM names operators that are kernels, and one name stands for all rotary ones."""
    given = {} if said is None else {"compilation_config": said, "enforce_eager": False}
    args = stage_engine_args(from_kwargs(plan.model, **given), ReplicaId("thinker", 0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        config = args.create_engine_config()
    assert config.compilation_config.is_custom_op_enabled(MRotaryEmbedding.name)
    assert f"+{MRotaryEmbedding.name}" in config.compilation_config.custom_ops


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_side_takes_no_media_that_another_server_would_refuse(
    plan: Plan, side: str, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM lets clients of a KV consumer leave embeddings out, which ends the engine that computes the prompt."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    split = {"thinker": {"prefill_decode": {}, "enable_mm_embeds": asked}}
    args = any_replica_args(from_kwargs(plan.model, stage_overrides=split), f"thinker.{side}")
    media = as_asked(args.create_engine_config(), args).model_config.multimodal_config
    assert media is not None
    assert (media.enable_mm_embeds, media.allow_missing_mm_embeddings) == (asked, False)


@pytest.mark.parametrize(
    "given",
    [{"talker_config": {"accept_hidden_layer": 1}, "tts_bos_token_id": 5}, changed],
    ids=["mapping", "function"],
)
def test_overrides_of_the_checkpoints_config_reach_every_stage(
    plan: Plan, given: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    said = from_kwargs(plan.model, hf_overrides=given)
    found = {}
    for stage in ("thinker", "talker", "code2wav"):
        args = stage_engine_args(said, ReplicaId(stage, 0))
        assert pickle.loads(pickle.dumps(args.hf_overrides)) == args.hf_overrides
        found[stage] = args.create_engine_config().model_config
    talker = found["talker"].hf_config
    assert (talker.accept_hidden_layer, talker.tts_bos_token_id) == (1, 5)
    assert [each.architectures for each in found.values()] == [
        ["Qwen3OmniMoeForConditionalGeneration"],
        ["Qwen3OmniTalker"],
        ["Qwen3OmniCode2Wav"],
    ]
    for model in found.values():
        whole = whole_config(model)
        assert model.hf_overrides is given or whole.tts_bos_token_id == whole.talker_config.accept_hidden_layer * 5
    without = stage_engine_args(plan, ReplicaId("talker", 0)).create_engine_config().model_config
    assert whole_config(without).tts_bos_token_id != 5


def test_threads_of_a_key_override_those_of_the_environment(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(THREADS, "7")
    said = from_kwargs(plan.model, stage_overrides={"talker": {"cpu_threads": 2}})
    deployment = Deployment(said, clients=1, usage=UsageContext.LLM_CLASS)
    found = {}
    for stage in ("thinker", "talker"):
        with deployment._replica_environment(stage, deployment.folder):
            found[stage] = os.environ[THREADS]
    deployment.close()
    assert found == {"thinker": "7", "talker": "2"}


def test_arguments_that_vllm_refuses_end_a_start_before_any_engine(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[ReplicaId] = []
    monkeypatch.setattr(Deployment, "_launch", lambda self, replica, config, addresses: started.append(replica))
    refused = from_kwargs(plan.model, stage_overrides={"code2wav": {"gpu_memory_utilization": 2.0}})
    wrong = r"^stage 'code2wav': vLLM refuses its engine arguments: gpu_memory_utilization: "
    with pytest.raises(ConfigError, match=wrong), Deployment(refused, clients=1, usage=UsageContext.LLM_CLASS):
        pass
    stages = [stage if stage.name != "code2wav" else replace(stage, replicas=()) for stage in refused.stages]
    elsewhere = replace(refused, stages=tuple(stages))
    with pytest.raises(ConfigError, match=wrong), Deployment(elsewhere, clients=1, usage=UsageContext.LLM_CLASS):
        pass
    assert started == []
