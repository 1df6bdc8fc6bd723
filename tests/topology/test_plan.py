"""From configuration to plan: who decides which engine argument, and what is refused."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from vllm_omni_ext.config.schema import OmniConfig, StageConfig
from vllm_omni_ext.errors import ConfigError, UnknownMember
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.plugins.memory import ModelFacts
from vllm_omni_ext.plugins.spec import PipelineSpec
from vllm_omni_ext.topology.plan import SHARED_FIELDS, Machine, Plan, make_plan


def plan_for(
    pipeline: PipelineSpec,
    machine: Machine,
    stages: dict[str, StageConfig] | None = None,
    text_args: dict[str, Any] | None = None,
    facts: ModelFacts | None = None,
    **config: Any,
) -> Plan:
    return make_plan(
        model="m",
        family="speakers",
        pipeline=pipeline,
        config=OmniConfig(stages=stages or {}, **config),
        text_args=text_args or {},
        machine=machine,
        facts=facts,
    )


def test_names_and_order(pipeline: PipelineSpec, cpu: Machine) -> None:
    plan = plan_for(pipeline, cpu, {"talker": StageConfig(replicas=2)})
    assert (plan.model, plan.family, plan.pipeline, plan.api_servers) == ("m", "speakers", "speech", 1)
    assert [str(replica.id) for replica in plan.replicas()] == ["thinker/0", "talker/0", "talker/1", "code2wav/0"]
    assert plan.frontend().name == "thinker"
    assert [edge.target for edge in plan.edges if edge.source == "thinker"] == ["talker", "talker"]
    assert [edge.source for edge in plan.edges_to("code2wav")] == ["talker"]
    assert plan.edges_to("thinker") == () and not [edge for edge in plan.edges if edge.source == "code2wav"]
    assert plan.replica(ReplicaId("talker", 1)).id == ReplicaId("talker", 1)


def test_a_stage_may_be_on_other_hosts(pipeline: PipelineSpec, cpu: Machine) -> None:
    plan = plan_for(pipeline, cpu, {"talker": StageConfig(replicas=0)})
    assert plan.stage("talker").replicas == ()
    assert plan.stage("talker").engine_args == plan_for(pipeline, cpu).stage("talker").engine_args
    assert [str(replica.id) for replica in plan.replicas()] == ["thinker/0", "code2wav/0"]


@pytest.mark.parametrize("machine", ["cpu", "four_gpus"])
def test_every_stage_may_be_elsewhere_the_frontend_too(
    pipeline: PipelineSpec, machine: str, request: pytest.FixtureRequest
) -> None:
    config = OmniConfig(stages={name: StageConfig(replicas=0) for name in ("thinker", "talker", "code2wav")})
    common: dict[str, Any] = {"model": "m", "pipeline": pipeline, "config": config, "text_args": {}}
    common["machine"] = request.getfixturevalue(machine)
    plan = make_plan(**common)
    assert plan.replicas() == ()
    assert plan.frontend().name == "thinker"


def test_unknown_members(pipeline: PipelineSpec, cpu: Machine) -> None:
    plan = plan_for(pipeline, cpu)
    for ask in (plan.stage, plan.edges_to):
        with pytest.raises(UnknownMember, match=r"^no stage 'dit'; the plan has thinker, talker, code2wav$"):
            ask("dit")
    with pytest.raises(UnknownMember, match=r"^no replica 'talker/1'; the plan has talker/0$"):
        plan.replica(ReplicaId("talker", 1))


def test_a_plan_travels_between_processes(pipeline: PipelineSpec, four_gpus: Machine) -> None:
    plan = plan_for(pipeline, four_gpus, {"talker": StageConfig(replicas=2)}, {"seed": 1})
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_stock_flags_are_for_the_frontend(pipeline: PipelineSpec, four_gpus: Machine) -> None:
    plan = plan_for(pipeline, four_gpus, text_args={"model": "m", "max_model_len": 100, "seed": 3, "dtype": "half"})
    assert plan.stage("thinker").engine_args == {
        "worker_cls": "pkg.W",
        "max_model_len": 100,
        "seed": 3,
        "dtype": "half",
    }
    assert plan.stage("talker").engine_args == {
        "max_num_seqs": 7,
        "seed": 3,
        "dtype": "half",
        "enable_prefix_caching": False,
    }


@pytest.mark.parametrize("field", sorted(SHARED_FIELDS))
def test_shared_fields_reach_every_stage(pipeline: PipelineSpec, four_gpus: Machine, field: str) -> None:
    plan = plan_for(pipeline, four_gpus, text_args={field: "value"})
    assert [stage.engine_args[field] for stage in plan.stages] == ["value"] * 3


def test_precedence(pipeline: PipelineSpec, cpu: Machine) -> None:
    """Overrides over flags over the file over the pipeline over the platform."""

    def seqs(stage: str, config: StageConfig, flags: dict[str, Any]) -> Any:
        return plan_for(pipeline, cpu, {stage: config}, flags).stage(stage).engine_args["max_num_seqs"]

    file, over = {"max_num_seqs": 2}, {"max_num_seqs": 4}
    assert seqs("thinker", StageConfig(), {}) == 16
    assert seqs("talker", StageConfig(), {}) == 7
    assert seqs("talker", StageConfig(engine=file), {"max_num_seqs": 3}) == 2
    assert seqs("thinker", StageConfig(engine=file), {}) == 2
    assert seqs("thinker", StageConfig(engine=file), {"max_num_seqs": 3}) == 3
    assert seqs("thinker", StageConfig(engine=file, engine_overrides=over), {"max_num_seqs": 3}) == 4


def test_a_shared_flag_beats_the_file_but_not_the_override(pipeline: PipelineSpec, cpu: Machine) -> None:
    stages = {
        "talker": StageConfig(engine={"dtype": "float16"}),
        "code2wav": StageConfig(engine_overrides={"dtype": "float16"}),
    }
    plan = plan_for(pipeline, cpu, stages, {"dtype": "bfloat16"})
    assert [stage.engine_args["dtype"] for stage in plan.stages] == ["bfloat16", "bfloat16", "float16"]


def test_default_parameters(pipeline: PipelineSpec, cpu: Machine) -> None:
    plan = plan_for(pipeline, cpu, {"talker": StageConfig(params={"temperature": 0.0})})
    assert plan.stage("talker").params == {"temperature": 0.0, "max_tokens": 4096}


def test_cuda_devices_and_shares(pipeline: PipelineSpec, four_gpus: Machine) -> None:
    stages = {"thinker": StageConfig(devices="0,1"), "talker": StageConfig(replicas=2)}
    plan = plan_for(pipeline, four_gpus, stages, {"tensor_parallel_size": 2})
    assert [replica.devices for replica in plan.replicas()] == [(0, 1), (2,), (3,), (2,)]
    assert "gpu_memory_utilization" not in plan.stage("thinker").engine_args
    assert plan.stage("talker").engine_args["gpu_memory_utilization"] == 0.6
    assert plan.stage("code2wav").engine_args["gpu_memory_utilization"] == 0.3
    assert [stage.env for stage in plan.stages] == [{}, {}, {}]


@pytest.mark.parametrize(
    ("devices", "talkers"),
    [
        ("0,1,2,3", [(0, 1), (2, 3)]),  # a pool: 2 replicas x 2 devices
        ("3,2,1,0", [(3, 2), (1, 0)]),
        ("0,1", [(0, 1), (2, 3)]),  # the first replica's devices
        ("1,0", [(1, 0), (3, 2)]),
        ("2,3,2,3", [(2, 3), (2, 3)]),  # shared
    ],
)
def test_written_devices_and_tensor_parallel_replicas(
    pipeline: PipelineSpec, four_gpus: Machine, devices: str, talkers: list[tuple[int, ...]]
) -> None:
    talker = StageConfig(replicas=2, devices=devices, engine={"tensor_parallel_size": 2})
    plan = plan_for(pipeline, four_gpus, {"talker": talker})
    assert [replica.devices for replica in plan.stage("talker").replicas] == talkers


@pytest.mark.parametrize(
    ("replicas", "devices", "message"),
    [
        (2, "0,1,2", "2 replicas x tensor_parallel_size 2 = 4 devices, but '0,1,2' names 3; write 4, or 2 for the"),
        (2, "0", "2 replicas x tensor_parallel_size 2 = 4 devices, but '0' names 1; write 4, or 2 for the"),
        (1, "0,1,2,3", "1 replica x tensor_parallel_size 2 = 2 devices, but '0,1,2,3' names 4"),
        (3, "0,1,2,3", "3 replicas x tensor_parallel_size 2 = 6 devices, but '0,1,2,3' names 4; write 6, or 2 for the"),
    ],
)
def test_wrong_counts_do_the_arithmetic(
    pipeline: PipelineSpec, four_gpus: Machine, replicas: int, devices: str, message: str
) -> None:
    """Tensor parallelism from the override, as the one that counts."""
    talker = StageConfig(
        replicas=replicas,
        devices=devices,
        engine={"tensor_parallel_size": 4},
        engine_overrides={"tensor_parallel_size": 2},
    )
    with pytest.raises(ConfigError) as caught:
        plan_for(pipeline, four_gpus, {"talker": talker})
    assert str(caught.value).startswith(f"stages.talker.devices: {message}")


def test_the_users_utilization_stays(pipeline: PipelineSpec, four_gpus: Machine) -> None:
    stages = {name: StageConfig(devices="0") for name in ("thinker", "talker", "code2wav")}
    plan = plan_for(pipeline, four_gpus, stages, {"gpu_memory_utilization": 0.3})
    values = [stage.engine_args["gpu_memory_utilization"] for stage in plan.stages]
    assert values == [0.3, 0.4, 0.2]


def test_kv_cache_bytes(pipeline: PipelineSpec, four_gpus: Machine) -> None:
    plan = plan_for(pipeline, four_gpus, {"talker": StageConfig(kv_cache_bytes=5)})
    assert plan.stage("talker").engine_args["kv_cache_memory_bytes"] == 5


def test_one_step_stage_holds_its_longest_sequence(pipeline: PipelineSpec, four_gpus: Machine) -> None:
    facts = ModelFacts(max_model_len={"thinker": 10, "code2wav": 65536})
    args = plan_for(pipeline, four_gpus, facts=facts).stage("code2wav").engine_args
    assert (args["max_model_len"], args["max_num_batched_tokens"]) == (65536, 65536)
    stages = {"code2wav": StageConfig(engine={"max_model_len": 100})}
    args = plan_for(pipeline, four_gpus, stages, facts=facts).stage("code2wav").engine_args
    assert (args["max_model_len"], args["max_num_batched_tokens"]) == (100, 100)
    stages = {"code2wav": StageConfig(engine={"max_num_batched_tokens": 200_000})}
    args = plan_for(pipeline, four_gpus, stages, facts=facts).stage("code2wav").engine_args
    assert (args["max_model_len"], args["max_num_batched_tokens"]) == (65536, 200_000)
    assert "max_model_len" not in plan_for(pipeline, four_gpus, facts=facts).stage("thinker").engine_args
    assert "max_model_len" not in plan_for(pipeline, four_gpus).stage("code2wav").engine_args


REFUSALS: list[tuple[dict[str, StageConfig], dict[str, Any], str]] = [
    ({"dit": StageConfig()}, {}, "stages.dit: pipeline 'speech' has no such stage; use one of thinker, talker, code2w"),
    (
        {"code2wav": StageConfig(engine={"runner": "generate"})},
        {},
        "stages.code2wav.engine.runner: the pipeline sets it to 'pooling' for 'code2wav'; remove it",
    ),
    (
        {"talker": StageConfig(engine_overrides={"enable_prefix_caching": True})},
        {},
        "stages.talker.engine.enable_prefix_caching: the pipeline sets it to False for 'talker'; remove it",
    ),
    ({}, {"worker_cls": "mine"}, "worker_cls: the pipeline sets it to 'pkg.W' for 'thinker'; remove it"),
    ({}, {"data_parallel_size": 2}, "data_parallel_size: write stages.thinker.replicas instead"),
    (
        {"talker": StageConfig(engine={"data_parallel_size": 2})},
        {},
        "stages.talker.engine.data_parallel_size: write stages.talker.replicas instead",
    ),
    (
        {"talker": StageConfig(engine={"device_ids": [1]})},
        {},
        "stages.talker.engine.device_ids: write stages.talker.de",
    ),
    ({"talker": StageConfig(engine={"model": "x"})}, {}, "stages.talker.engine.model: the model is given once, on the"),
    ({"talker": StageConfig(engine={"nnodes": 2})}, {}, "stages.talker.engine.nnodes: a replica runs on one host"),
    (
        {"talker": StageConfig(engine={"tensor_parallel_size": 0})},
        {},
        "stages.talker.engine.tensor_parallel_size: must be an integer >= 1, got 0",
    ),
    (
        {"talker": StageConfig(kv_cache_bytes=1, engine={"kv_cache_memory_bytes": 2})},
        {},
        "stages.talker.engine.kv_cache_memory_bytes: stages.talker.kv_cache_bytes says the same; keep one of the two",
    ),
]


@pytest.mark.parametrize(("stages", "text_args", "message"), REFUSALS)
def test_refusals(
    pipeline: PipelineSpec,
    four_gpus: Machine,
    stages: dict[str, StageConfig],
    text_args: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_for(pipeline, four_gpus, stages, text_args)
    assert str(caught.value).startswith(message)


def test_a_harmless_value_passes(pipeline: PipelineSpec, four_gpus: Machine) -> None:
    text_args = {"data_parallel_size": 1, "worker_cls": "pkg.W", "nnodes": 1}
    assert plan_for(pipeline, four_gpus, text_args=text_args).stage("thinker").engine_args["worker_cls"] == "pkg.W"


def test_a_config_for_another_pipeline(pipeline: PipelineSpec, cpu: Machine) -> None:
    with pytest.raises(ConfigError, match=r"^pipeline: the stage config is for 'other', but the model is 'speech'$"):
        make_plan(model="m", pipeline=pipeline, config=OmniConfig(pipeline="other"), text_args={}, machine=cpu)


@pytest.mark.parametrize(
    ("config", "chunks"),
    [
        ({}, {"words": (1, 5), "adaptive": True}),
        ({"chunks": {"words": (3,), "adaptive": False}}, {"words": (3,), "adaptive": False}),
        ({"async_chunk": False}, {"words": "all", "adaptive": True}),
        ({"async_chunk": False, "chunks": {"words": (3,)}}, {"words": "all", "adaptive": True}),
    ],
    ids=str,
)
def test_chunks(pipeline: PipelineSpec, cpu: Machine, config: dict[str, Any], chunks: dict[str, Any]) -> None:
    plan = make_plan(model="m", pipeline=pipeline, config=OmniConfig(**config), text_args={}, machine=cpu)
    assert plan.chunks == chunks


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"chunks": {"word": (3,)}}, "chunks.word: unknown key; did you mean 'words'?"),
        ({"stream_idle_timeout_s": 30.0}, "stream_idle_timeout_s: must be more than chunk_timeout_s (30), got 30"),
    ],
    ids=str,
)
def test_refused_chunks(pipeline: PipelineSpec, cpu: Machine, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_plan(model="m", pipeline=pipeline, config=OmniConfig(**config), text_args={}, machine=cpu)
    assert str(caught.value) == message


def test_streaming_stages_know_how_long_to_wait(pipeline: PipelineSpec, cpu: Machine) -> None:
    config = OmniConfig(
        stream_idle_timeout_s=77.0, stages={"code2wav": StageConfig(engine={"additional_config": {"x": 1}})}
    )
    plan = make_plan(model="m", pipeline=pipeline, config=config, text_args={}, machine=cpu)
    assert plan.stage("code2wav").engine_args["additional_config"] == {"stream_idle_timeout_s": 77.0, "x": 1}
    assert "additional_config" not in plan.stage("thinker").engine_args


def test_more_replicas_are_needed_than_can_ever_be_up(pipeline: PipelineSpec, cpu: Machine) -> None:
    message = "min_replicas: 3 can never be up, because 2 are started here and none can join; set a master_address"
    two = {"talker": StageConfig(replicas=2, min_replicas=3)}
    with pytest.raises(ConfigError, match=rf"^stages\.talker\.{message}"):
        plan_for(pipeline, cpu, two)
    assert plan_for(pipeline, cpu, two, master_address="10.0.0.1").config.stage("talker").min_replicas == 3
    assert plan_for(pipeline, cpu, {"talker": StageConfig(replicas=3, min_replicas=3)})
