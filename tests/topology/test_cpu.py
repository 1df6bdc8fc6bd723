"""Defaults on a CPU machine."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

from vllm_omni_ext.config.schema import OmniConfig, StageConfig
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.plugins.memory import ModelFacts, StageFacts
from vllm_omni_ext.plugins.spec import PipelineSpec
from vllm_omni_ext.topology.machine import Machine, number_of_threads
from vllm_omni_ext.topology.plan import Plan
from vllm_omni_ext.topology.planner import STAGE_WORKER, make_plan

MIB = 1 << 20


def thinker(max_model_len: int = 0, kv_bytes_per_token: int = 0) -> ModelFacts:
    layer = {"kv_layers": 1, "kv_heads": 1, "kv_head_dim": kv_bytes_per_token // 8}
    return {"thinker": StageFacts(max_model_len=max_model_len, **layer)}


def plan_for(pipeline: PipelineSpec, machine: Machine, facts: ModelFacts | None = None, **stages: StageConfig) -> Plan:
    config = OmniConfig(stages=stages)
    return make_plan(model="m", pipeline=pipeline, config=config, text_args={}, machine=machine, facts=facts)


def test_the_defaults_of_a_cpu_machine(pipeline: PipelineSpec, cpu: Machine) -> None:
    plan = plan_for(pipeline, cpu)
    common = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_num_seqs": 16,
        "distributed_executor_backend": "uni",
    }
    assert plan.stage("thinker").engine_args == {
        **common,
        "worker_cls": "pkg.W",
        "kv_cache_memory_bytes": 256 * MIB,
    }
    assert plan.stage("code2wav").engine_args == {
        **common,
        "worker_cls": STAGE_WORKER,
        "runner": "pooling",
        "kv_cache_memory_bytes": 16 * MIB,
        "additional_config": {"stream_idle_timeout_s": 120.0},
    }
    assert [replica.devices for replica in plan.replicas()] == [(), (), ()]


@pytest.mark.parametrize(
    ("cores", "replicas", "threads"), [(8, 1, "2"), (8, 2, "2"), (8, 6, "1"), (1, 1, "1"), (8, 0, "4")]
)
def test_the_cores_are_divided_between_the_replicas(
    pipeline: PipelineSpec, cpu: Machine, cores: int, replicas: int, threads: str
) -> None:
    plan = plan_for(pipeline, replace(cpu, cpu_count=cores), talker=StageConfig(replicas=replicas))
    assert plan.stage("thinker").env == {
        "OMP_NUM_THREADS": threads,
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }


def test_environment_may_be_changed(pipeline: PipelineSpec, cpu: Machine) -> None:
    stage = StageConfig(cpu_threads=5, env={"VLLM_CPU_OMP_THREADS_BIND": "0-3", "MINE": "1"})
    env = plan_for(pipeline, cpu, talker=stage).stage("talker").env
    assert env == {
        "OMP_NUM_THREADS": "5",
        "VLLM_CPU_OMP_THREADS_BIND": "0-3",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "MINE": "1",
    }


@pytest.mark.parametrize(
    ("facts", "cache", "length"),
    [
        ({}, 256 * MIB, None),
        (thinker(32768), 256 * MIB, None),
        (thinker(1024, 1024), 32 * MIB, None),
        (thinker(2048, MIB), 2560 * MIB, None),
        (thinker(65536, MIB), 4096 * MIB, 3584),
    ],
)
def test_the_kv_cache_holds_one_sequence_if_half_of_the_memory_suffices(
    pipeline: PipelineSpec, cpu: Machine, facts: ModelFacts, cache: int, length: int | None
) -> None:
    args: Any = plan_for(pipeline, cpu, facts).stage("thinker").engine_args
    assert (args["kv_cache_memory_bytes"], args.get("max_model_len")) == (cache, length)


def test_replicas_on_other_hosts_need_no_memory_here(pipeline: PipelineSpec, cpu: Machine) -> None:
    away = {name: StageConfig(replicas=0, devices="0") for name in ("talker", "code2wav")}
    args = plan_for(pipeline, cpu, thinker(65536, MIB), **away).stage("thinker").engine_args
    assert args["kv_cache_memory_bytes"] == 12 * 1024 * MIB


def test_tensor_parallel_replicas_have_several_processes(pipeline: PipelineSpec, cpu: Machine) -> None:
    args = plan_for(pipeline, cpu, talker=StageConfig(engine={"tensor_parallel_size": 2})).stage("talker").engine_args
    assert "distributed_executor_backend" not in args


def test_cores_and_memory_are_divided_between_the_processes_of_replicas(pipeline: PipelineSpec, cpu: Machine) -> None:
    facts = {"thinker": StageFacts(max_model_len=65536, kv_layers=1, kv_heads=4, kv_head_dim=MIB // 32)}
    stage = StageConfig(engine={"tensor_parallel_size": 4})
    plan = plan_for(pipeline, replace(cpu, cpu_count=12), facts, thinker=stage)
    args = plan.stage("thinker").engine_args
    assert {each.env["OMP_NUM_THREADS"] for each in plan.stages} == {"2"}
    # Each of 6 processes has 2 GiB, and a token has a fourth of a MiB in each rank.
    assert (args["kv_cache_memory_bytes"], args["max_model_len"]) == (2 << 30, 8192 - 512)
    stage = StageConfig(engine={"tensor_parallel_size": 4, "kv_cache_memory_bytes": 8 << 30})
    with pytest.raises(
        ConfigError, match=r"^kv_cache_memory_bytes: 32\.0 GiB of KV cache for thinker, and this machine"
    ):
        plan_for(pipeline, cpu, thinker=stage)


def test_threads_of_the_environment_apply_unless_the_stage_has_a_number(pipeline: PipelineSpec, cpu: Machine) -> None:
    machine = replace(cpu, variables={"OMP_NUM_THREADS": "3,1"})
    stages = {"talker": StageConfig(cpu_threads=5), "code2wav": StageConfig(env={"OMP_NUM_THREADS": "4,1"})}
    plan = plan_for(pipeline, machine, **stages)
    assert [each.env["OMP_NUM_THREADS"] for each in plan.stages] == ["3,1", "5", "4,1"]
    assert [number_of_threads(each.env) for each in plan.stages] == [3, 5, 4]
    with pytest.raises(ConfigError, match=r"^OMP_NUM_THREADS: must be an integer >= 1, got 'x'"):
        plan_for(pipeline, replace(cpu, variables={"OMP_NUM_THREADS": "x"}))
    with pytest.raises(ConfigError, match=r"^stages\.talker\.env\.OMP_NUM_THREADS: must be an integer >= 1, got '0'"):
        plan_for(pipeline, cpu, talker=StageConfig(env={"OMP_NUM_THREADS": "0"}))


@pytest.mark.parametrize(
    ("space", "stages", "message"),
    [
        ("12", {}, ""),
        ("13", {}, "VLLM_CPU_KVCACHE_SPACE: 26.0 GiB of KV cache for thinker, talker, and this machine has 24.0 GiB"),
        ("9", {"talker": StageConfig(replicas=2)}, "VLLM_CPU_KVCACHE_SPACE: 27.0 GiB of KV cache for thinker, talker"),
        ("9", {"talker": StageConfig(env={"VLLM_CPU_KVCACHE_SPACE": "20"})}, "VLLM_CPU_KVCACHE_SPACE: 29.0 GiB of KV "),
        ("1.5", {}, "VLLM_CPU_KVCACHE_SPACE: must be a number of GiB, an integer, got '1.5'"),
    ],
)
def test_kv_caches_of_the_environments_size_fit_into_the_memory(
    pipeline: PipelineSpec, cpu: Machine, space: str, stages: dict[str, StageConfig], message: str
) -> None:
    machine = replace(cpu, variables={"VLLM_CPU_KVCACHE_SPACE": space})
    with pytest.raises(ConfigError) if message else nullcontext() as caught:
        plan_for(pipeline, machine, **stages)
    assert caught is None or str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("talker", "message"),
    [
        ({"devices": "0"}, "stages.talker.devices: this machine has no CUDA device; remove it"),
        ({"engine": {"enable_sleep_mode": True}}, "enable_sleep_mode: stage 'talker' is on a CPU, where vLLM has no "),
        (
            {"engine": {"kv_cache_memory_bytes": 40 << 30}, "replicas": 2},
            "kv_cache_memory_bytes: 80.0 GiB of KV cache for talker, and this machine has 64.0 GiB of memory; ",
        ),
    ],
)
def test_settings_that_no_cpu_machine_can_meet_are_refused(
    pipeline: PipelineSpec, cpu: Machine, talker: dict[str, Any], message: str
) -> None:
    machine = replace(cpu, memory_bytes=64 << 30)
    with pytest.raises(ConfigError) as caught:
        plan_for(pipeline, machine, talker=StageConfig(**talker))
    assert str(caught.value).startswith(message)
    plan_for(pipeline, machine, talker=StageConfig(engine={"kv_cache_memory_bytes": 64 << 30}))
    plan_for(pipeline, machine, talker=StageConfig(replicas=0, engine={"kv_cache_memory_bytes": 1 << 50}))
