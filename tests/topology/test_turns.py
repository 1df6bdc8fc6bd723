"""Replicas start at once, and one after the other where they share a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_ext.config.schema import OmniConfig, StageConfig
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.plugins.spec import PipelineSpec
from vllm_omni_ext.topology.machine import Machine
from vllm_omni_ext.topology.placement import Turns, devices_of, longest_sequence, start_order
from vllm_omni_ext.topology.plan import Plan
from vllm_omni_ext.topology.planner import make_plan

THINKER, TALKER, CODE2WAV = (ReplicaId(stage, 0) for stage in ("thinker", "talker", "code2wav"))
A, B, C, D = (ReplicaId("talker", index) for index in range(4))


@pytest.fixture
def plan_on(pipeline: PipelineSpec, four_gpus: Machine) -> Any:
    """Make a plan for a machine with so many devices."""

    def make(devices: int, **stages: Any) -> Plan:
        config = OmniConfig(stages={name: StageConfig(**values) for name, values in stages.items()})
        machine = replace(four_gpus, device_count=devices)
        return make_plan(model="m", pipeline=pipeline, config=config, text_args={}, machine=machine)

    return make


def waves(devices: Mapping[ReplicaId, tuple[int, ...]]) -> list[list[str]]:
    """The replicas that start at once, then those that start when all of these are ready, and so on."""
    turns = Turns(devices)
    starting = [each for replica in devices for each in turns.enter(replica)]
    found = []
    while starting:
        found.append([str(replica) for replica in starting])
        starting = [each for replica in starting for each in turns.leave(replica)]
    return found


@pytest.mark.parametrize(
    ("count", "stages", "expected"),
    [
        (1, {}, [["thinker/0"], ["talker/0"], ["code2wav/0"]]),
        (2, {}, [["thinker/0", "talker/0"], ["code2wav/0"]]),
        (3, {}, [["thinker/0", "talker/0", "code2wav/0"]]),
        (2, {"talker": {"replicas": 2}}, [["thinker/0", "talker/0"], ["talker/1"], ["code2wav/0"]]),
        (
            2,
            {"thinker": {"devices": "0,1", "engine": {"tensor_parallel_size": 2}}},
            [["thinker/0"], ["talker/0", "code2wav/0"]],
        ),
        (
            1,
            {"talker": {"engine": {"gpu_memory_utilization": 0.7}}},
            [["talker/0"], ["thinker/0"], ["code2wav/0"]],
        ),
    ],
    ids=["one", "two", "three", "two talkers on one", "TP 2 over both", "the largest first"],
)
def test_replicas_that_share_a_device_start_in_order_of_their_memory(
    plan_on: Any, count: int, stages: Any, expected: list[list[str]]
) -> None:
    devices = devices_of(plan_on(count, **stages))
    assert waves(devices) == expected
    assert longest_sequence(devices) == len(expected)


def test_on_a_cpu_all_start_at_once_in_the_plans_order(pipeline: PipelineSpec, cpu: Machine) -> None:
    config = OmniConfig(stages={"talker": StageConfig(replicas=2)})
    plan = make_plan(model="m", pipeline=pipeline, config=config, text_args={}, machine=cpu)
    assert start_order(plan) == [replica.id for replica in plan.replicas()]
    assert waves(devices_of(plan)) == [[str(replica.id) for replica in plan.replicas()]]
    assert longest_sequence(devices_of(plan)) == 1


def test_waiting_replica_is_not_overtaken_on_its_device() -> None:
    turns = Turns({A: (0,), B: (0, 1), C: (1,), D: (2,)})
    assert [turns.enter(replica) for replica in (A, B, C, D)] == [[A], [], [], [D]]
    assert turns.leave(D) == []
    assert turns.leave(A) == [B]
    assert turns.leave(B) == [C]


def test_replica_that_gives_up_waiting_frees_its_turn() -> None:
    turns = Turns({A: (0,), B: (0, 1), C: (1,)})
    assert [turns.enter(replica) for replica in (A, B, C)] == [[A], [], []]
    assert turns.leave(B) == [C]
    assert turns.leave(A) == [] and turns.leave(A) == []
    assert turns.enter(A) == [A]


@given(st.lists(st.sets(st.integers(0, 3), max_size=3), max_size=8), st.randoms())
def test_no_two_replicas_start_on_a_device_at_once_and_all_start(used: list[set[int]], random: Any) -> None:
    devices = {ReplicaId("talker", index): tuple(sorted(each)) for index, each in enumerate(used)}
    turns = Turns(devices)
    starting = [each for replica in devices for each in turns.enter(replica)]
    started = set(starting)
    while starting:
        taken = [device for replica in starting for device in devices[replica]]
        assert len(taken) == len(set(taken))
        done = starting.pop(random.randrange(len(starting)))
        more = turns.leave(done)
        starting += more
        started |= set(more)
    assert started == set(devices)
