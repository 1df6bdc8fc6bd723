"""The plan as text and as data."""

from __future__ import annotations

import json

import pytest

from vllm_omni_ext.config.schema import OmniConfig, StageConfig, Timeouts
from vllm_omni_ext.plugins.spec import PipelineSpec
from vllm_omni_ext.topology.explain import as_json, explain, unshared_caches
from vllm_omni_ext.topology.machine import Machine
from vllm_omni_ext.topology.plan import Headless
from vllm_omni_ext.topology.planner import make_plan

PROCESSES = """\
machine   cuda, 4 devices, 64 cores, 512.0 GiB memory

processes
  head
  |- coordinator
  |- api_server 0
  |- thinker/0  device 0,1
  |- talker/0  device 2
  |- talker/1  device 3
  |- code2wav/0  device 2

hand-overs
  thinker -> talker  tokens, words in chunks of 1, 5
  thinker -> talker  tensors
  talker -> code2wav  tokens
"""
SETTINGS = (
    "request deadline  30 s",
    "stage thinker: 1 replica, the frontend",
    "hf_token              ***",
    "tensor_parallel_size  2",
    "MY_SECRET  ***",
    "NAME       value",
    "kv_cache_memory_bytes   1048576 (1 MiB)",
    "temperature  0.9",
)


def test_a_headless_plan_shows_the_head_and_the_replicas_here(pipeline: PipelineSpec, four_gpus: Machine) -> None:
    replicas = {"thinker": 0, "talker": 2, "code2wav": 0}
    config = OmniConfig(stages={name: StageConfig(replicas=count) for name, count in replicas.items()})
    plan = make_plan(model="m", pipeline=pipeline, config=config, text_args={}, machine=four_gpus)
    headless = Headless(stage="talker", replicas=2, head=("10.0.0.1", 9100), replica_address=None)
    text = explain(plan, headless)
    tree = ["  headless, joins 10.0.0.1 port 9100", "  |- talker  device 0", "  |- talker  device 1"]
    assert "\n".join(["processes", *tree, "", "hand-overs"]) in text
    assert "stage thinker: 0 replicas here, the frontend\n" in text
    data = json.loads(json.dumps(as_json(plan, headless)))
    assert data["api_servers"] == 0
    expected = {"stage": "talker", "replicas": 2, "head": ["10.0.0.1", 9100], "replica_address": None}
    assert data["headless"] == expected


def test_the_plan_as_text_and_as_data_without_secrets(pipeline: PipelineSpec, four_gpus: Machine) -> None:
    config = OmniConfig(
        timeouts=Timeouts(request_timeout_s=30),
        stages={
            "thinker": StageConfig(engine={"tensor_parallel_size": 2}, env={"NAME": "value", "MY_SECRET": "x"}),
            "talker": StageConfig(replicas=2, kv_cache_bytes=1 << 20),
            "code2wav": StageConfig(engine={"x": {"a": (1, object)}}),  # no data of JSON
        },
    )
    plan = make_plan(model="m", pipeline=pipeline, config=config, text_args={"hf_token": "secret"}, machine=four_gpus)
    text = explain(plan)
    assert all(part in text for part in (PROCESSES, *SETTINGS))
    data = json.loads(json.dumps(as_json(plan)))
    assert data["stages"][1]["replicas"] == [{"id": "talker/0", "devices": [2]}, {"id": "talker/1", "devices": [3]}]
    assert data["stages"][0]["engine_args"]["hf_token"] == "***"
    assert data["stages"][0]["env"] == {"NAME": "value", "MY_SECRET": "***"}
    edge = {"source": "thinker", "target": "talker", "kind": "tokens", "name": "words", "chunks": [1, 5]}
    assert data["edges"][0] == edge
    assert data["chunks"] == {"words": [1, 5], "adaptive": True}
    assert data["config"]["timeouts"]["request_timeout_s"] == 30


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("where", ["command line", "stage"])
def test_caches_that_are_switched_off_are_named(count: int, where: str, pipeline: PipelineSpec, cpu: Machine) -> None:
    for kind in ("shm", "lru"):
        engine = {"mm_processor_cache_type": kind}
        config = OmniConfig(
            api_servers=count, stages={"thinker": StageConfig(engine=engine if where == "stage" else {})}
        )
        text_args = {} if where == "stage" else engine
        plan = make_plan(model="m", pipeline=pipeline, config=config, text_args=text_args, machine=cpu)
        said = unshared_caches(plan)
        assert [line.partition(",")[0] for line in said if "API servers, each" in line] == (
            [] if count == 1 else ["2 API servers"]
        )
        warnings = [line for line in said if line.startswith("warning: mm_processor_cache_type: shm is switched off")]
        assert len(warnings) == (kind == "shm")
        assert len(said) == (count > 1) + (kind == "shm")
