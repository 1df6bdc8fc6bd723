"""Each end of a hand-over of tensors is told of its connector, and both are told the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from vllm_omni_ext.config.connectors import DEFAULTS
from vllm_omni_ext.config.schema import OmniConfig, StageConfig
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.model_plugins.qwen3_omni.family import QWEN3_OMNI
from vllm_omni_ext.plugins.spec import EdgeSpec, PipelineSpec
from vllm_omni_ext.topology.agreement import config_hash
from vllm_omni_ext.topology.explain import as_json, explain
from vllm_omni_ext.topology.plan import Machine, Plan, make_plan

HEAD = {"master_address": "10.0.0.1", "master_port": 9100}


@pytest.fixture
def named(pipeline: PipelineSpec) -> PipelineSpec:
    edges = (pipeline.edges[0], EdgeSpec("thinker", "talker", "tensors", name="hidden_states"), pipeline.edges[2])
    return replace(pipeline, edges=edges)


def plan_of(pipeline: PipelineSpec, machine: Machine, **config: Any) -> Plan:
    return make_plan(model="m", pipeline=pipeline, config=OmniConfig(**config), text_args={}, machine=machine)


@pytest.mark.parametrize(("config", "name"), [({}, "shared_memory"), (HEAD, "tcp")])
def test_both_ends_know_and_nobody_else(named: PipelineSpec, cpu: Machine, config: Any, name: str) -> None:
    plan = plan_of(named, cpu, **config)
    edge = {"hidden_states": {"name": name, **DEFAULTS}}
    assert plan.connectors == edge
    assert plan.stage("thinker").engine_args["additional_config"] == {"outgoing": edge}
    assert plan.stage("talker").engine_args["additional_config"] == {"incoming": edge}
    assert set(plan.stage("code2wav").engine_args["additional_config"]) == {"stream_idle_timeout_s"}
    assert f"  thinker -> talker  tensors, hidden_states over {name}\n" in explain(plan)
    assert as_json(plan)["connectors"] == edge


def test_what_the_user_tells_an_engine_stays(named: PipelineSpec, cpu: Machine) -> None:
    stages = {"talker": StageConfig(engine={"additional_config": {"x": 1}})}
    found = plan_of(named, cpu, stages=stages).stage("talker").engine_args["additional_config"]
    assert set(found) == {"x", "incoming"}


def test_a_hand_over_without_a_name_has_none(pipeline: PipelineSpec, cpu: Machine) -> None:
    plan = plan_of(pipeline, cpu)
    assert plan.connectors == {} and "additional_config" not in plan.stage("thinker").engine_args


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"hidden_state": {}}, "connectors.hidden_state: unknown key; did you mean 'hidden_states'?"),
        ({"words": {}}, "connectors.words: unknown key; use one of hidden_states"),
        ({"hidden_states": {"name": "tpc"}}, "connectors.hidden_states.name: no connector 'tpc'; did you mean 'tcp'?"),
    ],
    ids=str,
)
def test_what_is_refused(named: PipelineSpec, cpu: Machine, said: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_of(named, cpu, connectors=said)
    assert str(caught.value) == message


def test_hosts_may_listen_elsewhere_but_use_one_connector(named: PipelineSpec, cpu: Machine) -> None:
    def hash_of(**fields: Any) -> str:
        return config_hash(plan_of(named, cpu, **HEAD, connectors={"hidden_states": fields}), "talker")

    assert hash_of(host="10.0.0.1", port=7000, device="eth0") == hash_of(host="10.0.0.2") == hash_of()
    assert hash_of(name="mooncake") != hash_of()


def test_the_real_pipeline_has_one() -> None:
    machine = Machine(platform="cuda", device_count=2, cpu_count=8, memory_bytes=1 << 36)
    assert list(plan_of(QWEN3_OMNI, machine).connectors) == ["hidden_states"]
    assert QWEN3_OMNI.chunks().keys() == {"text", "frames"}
