"""A stage with `prefill_decode` becomes two stages and an edge."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest

from vllm_omni_ext.config.overrides import with_overrides
from vllm_omni_ext.config.parse import Names, parse_config
from vllm_omni_ext.config.schema import OmniConfig
from vllm_omni_ext.disaggregation.parameters import CONNECTORS
from vllm_omni_ext.errors import ConfigError, UnknownMember
from vllm_omni_ext.plugins.memory import StageFacts
from vllm_omni_ext.plugins.spec import EdgeSpec, PipelineSpec
from vllm_omni_ext.topology.agreement import config_hash
from vllm_omni_ext.topology.disaggregation import expand
from vllm_omni_ext.topology.explain import as_json, explain
from vllm_omni_ext.topology.machine import Machine
from vllm_omni_ext.topology.plan import Plan
from vllm_omni_ext.topology.planner import make_plan

PREFILL, DECODE = "thinker.prefill", "thinker.decode"
NAMES = Names(
    stages=("thinker", "talker", "code2wav"),
    engine={
        "dtype",
        "block_size",
        "max_num_seqs",
        "tensor_parallel_size",
        "kv_transfer_config",
        "kv_cache_memory_bytes",
    },
    params={"thinker": {"temperature"}},
)


def config_of(split: Any = None, /, *, overrides: dict[str, Any] | None = None, **thinker: Any) -> OmniConfig:
    """A configuration as from a file, with the thinker split."""
    stages = {"thinker": {**thinker, "prefill_decode": split}}
    return with_overrides(parse_config({"stages": stages}, NAMES), overrides or {}, NAMES)


def plan_of(pipeline: PipelineSpec, machine: Machine, config: OmniConfig, **more: Any) -> Plan:
    return make_plan(
        model="m", pipeline=pipeline, config=config, text_args=more.pop("text_args", {}), machine=machine, **more
    )


def error_of(pipeline: PipelineSpec, machine: Machine, config: OmniConfig, **more: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        plan_of(pipeline, machine, config, **more)
    return str(caught.value)


def test_without_the_key_nothing_changes(pipeline: PipelineSpec) -> None:
    config = parse_config({"stages": {"thinker": {"replicas": 2}}}, NAMES)
    assert expand(pipeline, config) == (pipeline, config)


def test_a_split_stage_is_two_stages(pipeline: PipelineSpec, cpu: Machine) -> None:
    config = config_of({"prefill": {"replicas": 2}, "decode": {"replicas": 3}})
    plan = plan_of(pipeline, cpu, config)
    once = expand(pipeline, config)
    assert expand(*once) == once and pickle.loads(pickle.dumps(plan)) == plan
    assert [stage.name for stage in plan.stages] == [PREFILL, DECODE, "talker", "code2wav"]
    assert [len(stage.replicas) for stage in plan.stages] == [2, 3, 1, 1]
    assert str(plan.stage(PREFILL).replicas[-1].id) == "thinker.prefill/1"
    assert (plan.frontend().name, plan.frontend().model_stage) == (DECODE, "thinker")
    assert [(stage.name, stage.model_stage) for stage in plan.model_stages()] == [
        (DECODE, "thinker"),
        ("talker", "talker"),
        ("code2wav", "code2wav"),
    ]
    assert plan.source_of(DECODE) == PREFILL
    assert [plan.source_of(name) for name in (PREFILL, "talker", "code2wav")] == [None] * 3
    assert plan.model_stage("thinker").name == DECODE
    with pytest.raises(UnknownMember, match=r"^no stage 'thinker.decode'; the plan has thinker, talker, code2wav$"):
        plan.model_stage(DECODE)


def test_edges_lead_into_prefill_and_out_of_decode(pipeline: PipelineSpec, cpu: Machine) -> None:
    loop = EdgeSpec("talker", "thinker", "tokens")
    plan = plan_of(replace(pipeline, edges=(*pipeline.edges, loop)), cpu, config_of())
    assert plan.edges == (
        EdgeSpec(PREFILL, DECODE, "kv"),
        EdgeSpec(DECODE, "talker", "tokens", name="words", chunks=(1, 5)),
        EdgeSpec(PREFILL, "talker", "tensors"),
        EdgeSpec(DECODE, "talker", "tensors"),
        EdgeSpec("talker", "code2wav", "tokens"),
        EdgeSpec("talker", PREFILL, "tokens"),
    )


def test_both_sides_can_send_hidden_states(pipeline: PipelineSpec, cpu: Machine) -> None:
    """Decode sends those of the answer, and while there is no prefill replica those of the prompt."""
    edge = EdgeSpec("thinker", "talker", "tensors", name="hidden_states")
    plan = plan_of(replace(pipeline, edges=(edge,)), cpu, config_of())
    assert list(plan.connectors) == ["hidden_states"]
    for side in (PREFILL, DECODE):
        assert f"  {side} -> talker  tensors, hidden_states over shared_memory\n" in explain(plan)
        assert plan.stage(side).engine_args["additional_config"] == {"outgoing": plan.connectors}
    assert plan.stage("talker").engine_args["additional_config"] == {"incoming": plan.connectors}
    assert config_hash(plan, PREFILL) != config_hash(plan, DECODE)


def test_settings_of_the_stage_apply_to_both_sides_unless_a_side_has_its_own(
    pipeline: PipelineSpec, cpu: Machine
) -> None:
    split = {
        "prefill": {"engine": {"max_num_seqs": 2}, "env": {"A": "1"}, "cpu_threads": 3, "lb_policy": "random"},
        "decode": {"kv_cache_bytes": 99},
    }
    config = config_of(
        split,
        engine={"max_num_seqs": 8, "block_size": 16},
        env={"A": "0", "B": "0"},
        kv_cache_bytes=77,
        params={"temperature": 0.5},
    )
    plan = plan_of(pipeline, cpu, config)
    prefill, decode = plan.stage(PREFILL), plan.stage(DECODE)
    assert (prefill.engine_args["max_num_seqs"], decode.engine_args["max_num_seqs"]) == (2, 8)
    assert prefill.engine_args["block_size"] == decode.engine_args["block_size"] == 16
    assert [stage.engine_args["kv_cache_memory_bytes"] for stage in (prefill, decode)] == [77, 99]
    assert [stage.env["A"] + stage.env["B"] for stage in (prefill, decode)] == ["10", "00"]
    assert (prefill.env["OMP_NUM_THREADS"], decode.env["OMP_NUM_THREADS"]) == ("3", "2")
    assert [plan.config.policy(stage.name) for stage in (prefill, decode)] == ["random", "least-queue-length"]
    assert (prefill.params, decode.params) == ({}, {"temperature": 0.5})


def test_the_pipeline_s_settings_and_stock_flags_reach_both_sides(pipeline: PipelineSpec, cpu: Machine) -> None:
    plan = plan_of(pipeline, cpu, config_of(), text_args={"max_num_seqs": 5, "dtype": "bfloat16"})
    for name in (PREFILL, DECODE):
        assert plan.stage(name).engine_args["worker_cls"] == "pkg.W"
        assert plan.stage(name).engine_args["max_num_seqs"] == 5
        assert plan.stage(name).engine_args["dtype"] == "bfloat16"
    assert plan.stage("talker").engine_args["max_num_seqs"] == 7


def test_facts_of_the_model_apply_to_both_sides(pipeline: PipelineSpec, cpu: Machine) -> None:
    facts = {"thinker": StageFacts(max_model_len=4096, kv_layers=1, kv_heads=1, kv_head_dim=1 << 17)}
    split = plan_of(pipeline, cpu, config_of(), facts=facts)
    for name in (PREFILL, DECODE):
        args = split.stage(name).engine_args
        # Half of 24 GiB, for each of four replicas.
        assert args["kv_cache_memory_bytes"] == 3 << 30
        assert args["max_model_len"] == (3 << 10) - 512


@pytest.mark.parametrize("connector", sorted(CONNECTORS))
def test_the_sides_have_their_roles(pipeline: PipelineSpec, cpu: Machine, connector: str) -> None:
    plan = plan_of(pipeline, cpu, config_of({"connector": connector, "on_failure": "fail"}))
    roles = [plan.stage(name).engine_args["kv_transfer_config"] for name in (PREFILL, DECODE)]
    assert roles[0]["kv_role"] != roles[1]["kv_role"]
    assert roles[1]["kv_load_failure_policy"] == "fail"
    assert "kv_transfer_config" not in plan.stage("talker").engine_args


def test_each_side_has_its_devices(pipeline: PipelineSpec, four_gpus: Machine) -> None:
    config = config_of({"prefill": {"replicas": 2, "devices": "0,1"}, "decode": {"devices": "2"}})
    plan = plan_of(pipeline, four_gpus, config)
    assert [replica.devices for replica in plan.replicas()] == [(0,), (1,), (2,), (3,), (3,)]


def test_hosts_must_agree_on_each_side(pipeline: PipelineSpec, cpu: Machine, four_gpus: Machine) -> None:
    here, there = (plan_of(pipeline, machine, config_of(engine={"dtype": "float32"})) for machine in (cpu, four_gpus))
    slow = plan_of(pipeline, cpu, config_of({"transfer_timeout_s": 9}))
    for name in (PREFILL, DECODE):
        assert config_hash(here, name) == config_hash(plan_of(pipeline, cpu, config_of()), name)
        assert config_hash(here, name) != config_hash(slow, name)
    assert config_hash(here, PREFILL) != config_hash(here, DECODE)
    assert config_hash(there, "talker") != config_hash(plan_of(pipeline, four_gpus, OmniConfig()), "talker")


def test_overrides_may_name_a_side(pipeline: PipelineSpec, cpu: Machine) -> None:
    overrides = {
        "thinker": {"max_num_seqs": 6},
        "thinker.prefill": {"replicas": 3, "max_num_seqs": 2},
        "thinker.decode": {"kv_cache_bytes": 5},
    }
    plan = plan_of(
        pipeline, cpu, config_of({"decode": {"replicas": 2}}, overrides=overrides), text_args={"max_num_seqs": 4}
    )
    assert [len(plan.stage(name).replicas) for name in (PREFILL, DECODE)] == [3, 2]
    assert [plan.stage(name).engine_args["max_num_seqs"] for name in (PREFILL, DECODE)] == [2, 6]
    assert plan.stage(DECODE).engine_args["kv_cache_memory_bytes"] == 5


def test_an_override_of_the_kv_cache_has_precedence_over_the_flag_and_the_flag_over_the_file(
    pipeline: PipelineSpec, cpu: Machine
) -> None:
    def sizes(split: dict[str, Any] | None = None, overrides: dict[str, Any] | None = None, **flags: int) -> list[int]:
        plan = plan_of(pipeline, cpu, config_of(split, overrides=overrides), text_args=flags)
        return [plan.stage(name).engine_args["kv_cache_memory_bytes"] for name in (PREFILL, DECODE)]

    file: dict[str, Any] = {"prefill": {"kv_cache_bytes": 1}, "decode": {"engine": {"kv_cache_memory_bytes": 2}}}
    side, stage = {"thinker.decode": {"kv_cache_bytes": 5}}, {"thinker": {"kv_cache_bytes": 6}}
    assert sizes(file) == [1, 2]
    assert sizes(file, kv_cache_memory_bytes=9) == [9, 9]
    assert sizes(file, side, kv_cache_memory_bytes=9) == [9, 5]
    assert sizes(file, stage, kv_cache_memory_bytes=9) == sizes(file, stage) == [6, 6]
    assert sizes(file, stage | side, kv_cache_memory_bytes=9) == [6, 5]
    assert sizes(file, {"thinker": {"kv_cache_memory_bytes": 7}}) == [7, 7]


def test_overrides_can_split_a_stage(pipeline: PipelineSpec, cpu: Machine) -> None:
    given = {"thinker": {"prefill_decode": {"prefill": {"replicas": 2}, "transfer_timeout_s": 3}}}
    plan = plan_of(pipeline, cpu, with_overrides(parse_config({}, NAMES), given, NAMES))
    assert len(plan.stage(PREFILL).replicas) == 2
    assert plan.config.stage(DECODE).prefill_decode.transfer_timeout_s == 3.0


BELOW = "stages.thinker.prefill_decode"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"prefill_decode": {"connector": "pigeon"}}, f"{BELOW}.connector: must be 'mooncake' or "),
        ({"prefill_decode": {"connectr": "mooncake"}}, f"{BELOW}.connectr: unknown key; did you mean 'connector'?"),
        ({"prefill_decode": 3}, f"{BELOW}: must be a mapping"),
        ({"prefill_decode": {"prefill": {"replicas": -1}}}, f"{BELOW}.prefill.replicas: must be an integer >= 0"),
        (
            {"prefill_decode": {"decode": {"dtype": "half"}}},
            f"{BELOW}.decode.dtype: is an engine setting; write it as ",
        ),
        ({"prefill_decode": {"decode": {"engine": {"dtyp": 1}}}}, f"{BELOW}.decode.engine.dtyp: unknown key"),
        ({"prefill_decode": {"decode": {"params": {}}}}, f"{BELOW}.decode.params: unknown key"),
        ({"prefill_decode": {"transfer_timeout_s": 0}}, f"{BELOW}.transfer_timeout_s: must be a number of seconds > 0"),
        ({"prefill_decode": {}, "replicas": 2}, "stages.thinker.replicas: the stage has replicas of two kinds; write "),
        ({"prefill_decode": {}, "devices": "0"}, "stages.thinker.devices: the stage has replicas of two kinds; write "),
    ],
)
def test_wrong_settings_are_refused_with_their_path(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"stages": {"thinker": config}}, NAMES)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"thinker": {"replicas": 2}}, "stages.thinker.replicas: the stage has replicas of two kinds; write "),
        ({"thinker.prefill": {"replica": 2}}, f"{BELOW}.prefill.replica: unknown key; did you mean 'replicas'?"),
        ({"talker.prefill": {"replicas": 2}}, "stages.talker.prefill: no such stage"),
    ],
)
def test_wrong_overrides_are_refused_with_their_path(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(overrides=overrides)
    assert str(caught.value).startswith(f"--stage-overrides: {message}")


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ({"decode": {"engine": {"dtype": "half"}}}, f"{BELOW}.decode.engine.dtype: "),
        ({"prefill": {"engine": {"block_size": 32}}}, f"{BELOW}.decode.engine.block_size: "),
        (
            {"prefill": {"engine": {"tensor_parallel_size": 2}}, "decode": {"engine": {"tensor_parallel_size": 3}}},
            f"{BELOW}.decode.engine.tensor_parallel_size: ",
        ),
        (
            {"prefill": {"engine": {"kv_transfer_config": {"kv_connector": "X"}}}},
            f"{BELOW}.prefill.engine.kv_transfer_config: the pipeline sets it to ",
        ),
        ({"kv_retention_s": 1, "transfer_timeout_s": 2}, f"{BELOW}.kv_retention_s: "),
        ({"protocol": "pigeon"}, f"{BELOW}.protocol: "),
    ],
)
def test_sides_that_do_not_fit_together_are_refused(
    pipeline: PipelineSpec, cpu: Machine, split: dict[str, Any], message: str
) -> None:
    assert error_of(pipeline, cpu, config_of(split)).startswith(message)


def test_wrong_devices_of_a_side_are_refused(pipeline: PipelineSpec, cpu: Machine, four_gpus: Machine) -> None:
    config = config_of({"prefill": {"devices": "9"}})
    assert error_of(pipeline, cpu, config).startswith(f"{BELOW}.prefill.devices: this machine has no CUDA device")
    assert error_of(pipeline, four_gpus, config).startswith(f"{BELOW}.prefill.devices: device 9 does not exist")


def test_a_stage_that_gets_input_while_it_decodes_cannot_be_split(pipeline: PipelineSpec, cpu: Machine) -> None:
    config = parse_config({"stages": {"talker": {"prefill_decode": {}}}}, NAMES)
    assert error_of(pipeline, cpu, config) == (
        "stages.talker.prefill_decode: 'talker' takes its input while it decodes, so its prompts cannot be computed "
        "elsewhere; only 'thinker' can be split; remove it"
    )


def test_a_frontend_that_its_family_does_not_declare_splittable_is_refused(pipeline: PipelineSpec) -> None:
    config = parse_config({"stages": {"thinker": {"prefill_decode": {}}}}, NAMES)
    whole = replace(pipeline, stages=tuple(replace(stage, splittable=False) for stage in pipeline.stages))
    with pytest.raises(ConfigError) as caught:
        expand(whole, config)
    assert str(caught.value) == (
        "stages.thinker.prefill_decode: 'thinker' is not declared splittable by its family (docs/prefill-decode.md); "
        "no stage of the pipeline 'speech' can be split; remove it"
    )


def test_the_plan_as_text_and_data(pipeline: PipelineSpec, cpu: Machine) -> None:
    plan = plan_of(pipeline, cpu, config_of({"decode": {"replicas": 2}}))
    for line in (
        "thinker.prefill -> thinker.decode  kv, mooncake",
        "1 replica, computes the prompts of thinker.decode",
    ):
        assert line in explain(plan)
    assert [stage["part_of"] for stage in as_json(plan)["stages"]] == ["thinker", "thinker", "", ""]
    assert as_json(plan)["edges"][0]["kind"] == "kv"
