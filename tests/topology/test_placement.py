"""Devices and memory shares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.topology.memory import (
    GIB,
    NOMINAL_DEVICE,
    SHARED_DEVICE_MEMORY,
    Demand,
    Need,
    divide,
    nominal_need,
)
from vllm_omni_ext.topology.placement import place

THINKER = Demand(stage="thinker", need=nominal_need(0.6))
TALKER = Demand(stage="talker", need=nominal_need(0.2))
CODE2WAV = Demand(stage="code2wav", need=nominal_need(0.1))
ONE_OF_EACH = (THINKER, TALKER, CODE2WAV)


@pytest.mark.parametrize(
    ("demands", "device_count", "devices"),
    [
        (ONE_OF_EACH, 1, (((0,),), ((0,),), ((0,),))),
        (ONE_OF_EACH, 2, (((0,),), ((1,),), ((1,),))),
        (ONE_OF_EACH, 8, (((0,),), ((1,),), ((2,),))),
        # The largest stage has a device for itself.
        ((THINKER, replace(TALKER, replicas=2), CODE2WAV), 2, (((0,),), ((1,), (1,)), ((1,),))),
        ((replace(THINKER, tensor_parallel=2), replace(TALKER, replicas=2)), 4, (((0, 1),), ((2,), (3,)))),
        # Written devices count for the other stages.
        ((replace(THINKER, devices="1"), TALKER, CODE2WAV), 2, (((1,),), ((0,),), ((0,),))),
        ((THINKER, replace(TALKER, devices="0"), CODE2WAV), 3, (((1,),), ((0,),), ((2,),))),
    ],
)
def test_stages_are_spread_over_the_devices(demands: Sequence[Demand], device_count: int, devices: Any) -> None:
    assert tuple(place(demands, device_count).values()) == devices


@pytest.mark.parametrize(
    ("sizes", "devices"),
    [
        ((80, 80), (0, 1, 1)),
        ((50, 80), (1, 0, 0)),
        ((80, 50), (0, 1, 1)),
        ((8, 80), (1, 1, 0)),
        ((80, 8, 30), (0, 2, 1)),
    ],
)
def test_devices_of_different_size_get_what_has_room_there(sizes: tuple[int, ...], devices: tuple[int, ...]) -> None:
    needs = {"thinker": 60, "talker": 9, "code2wav": 5}
    demands = [Demand(stage=name, need=Need(weights=size * GIB)) for name, size in needs.items()]
    placed = place(demands, len(sizes), [size * GIB for size in sizes])
    assert tuple(placed.values()) == tuple(((device,),) for device in devices)


@pytest.mark.parametrize(
    ("demand", "devices"),
    [
        (replace(TALKER, devices="1", replicas=3), ((1,), (2,), (3,))),
        (replace(TALKER, devices="2,2,2", replicas=3), ((2,), (2,), (2,))),
        (replace(TALKER, devices="3,1", tensor_parallel=2), ((3, 1),)),
        (replace(TALKER, devices="1,0", pipeline_parallel=2, replicas=2), ((1, 0), (3, 2))),
        (replace(TALKER, devices="2,3,2,3", tensor_parallel=2, replicas=2), ((2, 3), (2, 3))),
        (replace(TALKER, devices="0,2,1,3", tensor_parallel=2, replicas=2), ((0, 2), (1, 3))),
        (replace(TALKER, devices="0,1,2,3", tensor_parallel=2, pipeline_parallel=2), ((0, 1, 2, 3),)),
    ],
)
def test_written_devices(demand: Demand, devices: tuple[tuple[int, ...], ...]) -> None:
    assert place((demand,), 4) == {"talker": devices}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"devices": "0,1,2", "tensor_parallel": 2, "replicas": 2},
            ".devices: 2 replicas x tensor_parallel_size 2 = 4 devices, but '0,1,2' names 3; write 4, or 2 for the "
            "first replica",
        ),
        (
            {"devices": "0", "tensor_parallel": 2, "pipeline_parallel": 2},
            ".devices: 1 replica x tensor_parallel_size 2 x pipeline_parallel_size 2 = 4 devices, but '0' names 1",
        ),
        ({"devices": "0,4", "replicas": 2}, ".devices: device 4 does not exist; this machine has devices 0 to 3"),
        (
            {"devices": "0,1", "tensor_parallel": 2, "replicas": 3},
            ".devices: 3 replicas x tensor_parallel_size 2 = 6 devices; '0,1' for the first makes '0,1' and '2,3' and "
            "'4,5', but this machine has devices 0 to 3; write all 6 to place them differently or to share",
        ),
        (
            {"devices": "0,1", "tensor_parallel": 2, "replicas": 2, "device_count": 3},
            ".devices: 2 replicas x tensor_parallel_size 2 = 4 devices; '0,1' for the first makes '0,1' and '2,3', but "
            "this machine has devices 0 to 2; write all 4 to place them differently or to share",
        ),
        (
            {"devices": "0,2", "tensor_parallel": 2, "replicas": 2, "device_count": 8},
            ".devices: 2 replicas x tensor_parallel_size 2 = 4 devices; '0,2' for the first makes '0,2' and '2,4', "
            "which are not 4 different ones; write all 4",
        ),
        (
            {"devices": "1,1", "tensor_parallel": 2, "replicas": 2},
            ".devices: a replica would have the same device twice ('1,1'); name different ones",
        ),
        ({"devices": "1", "device_count": 1}, ".devices: device 1 does not exist; this machine has only device 0"),
        ({"tensor_parallel": 8}, ": a replica needs 8 devices (tensor_parallel_size 8), but this machine has 4"),
    ],
)
def test_wrong_devices_are_refused_with_the_arithmetic(changes: dict[str, Any], message: str) -> None:
    changes = dict(changes)
    device_count = changes.pop("device_count", 4)
    with pytest.raises(ConfigError) as caught:
        place((replace(TALKER, **changes),), device_count)
    assert str(caught.value) == f"stages.talker{message}"


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 4))
def test_a_template_gives_every_replica_its_own_devices(replicas: int, size: int, first: int) -> None:
    text = ",".join(str(first + at) for at in range(size))
    demand = replace(TALKER, devices=text, tensor_parallel=size, replicas=replicas)
    placed = place((demand,), first + replicas * size)["talker"]
    assert [device for devices in placed for device in devices] == list(range(first, first + replicas * size))


def test_a_stage_without_replicas_takes_nothing() -> None:
    """The same file serves all hosts, so devices of the stage are no error."""
    gone = replace(TALKER, replicas=0, devices="7", tensor_parallel=8)
    automatic = replace(CODE2WAV, replicas=0, tensor_parallel=8)
    placed = place((THINKER, gone, automatic), 1)
    assert placed == {"thinker": ((0,),), "talker": (), "code2wav": ()}
    assert divide((THINKER, gone, automatic), placed, [NOMINAL_DEVICE])[0] == {}


def shares(*demands: Demand, device_count: int) -> dict[str, float]:
    return divide(demands, place(demands, device_count), [NOMINAL_DEVICE] * device_count)[0]


@pytest.mark.parametrize(
    ("demands", "device_count", "expected"),
    [
        (ONE_OF_EACH, 1, {"thinker": 0.6, "talker": 0.2, "code2wav": 0.1}),
        (ONE_OF_EACH, 2, {"talker": 0.6, "code2wav": 0.3}),
        (ONE_OF_EACH, 3, {}),
        (
            (THINKER, replace(TALKER, replicas=2), replace(CODE2WAV, replicas=2)),
            1,
            {"thinker": 0.45, "talker": 0.15, "code2wav": 0.075},
        ),
        # A stage has the value of its fullest device.
        (
            (replace(THINKER, devices="0"), replace(TALKER, replicas=2, devices="0,1")),
            2,
            {"thinker": 0.675, "talker": 0.225},
        ),
        # Values of the user are subtracted first.
        ((replace(THINKER, utilization=0.6), TALKER, CODE2WAV), 1, {"talker": 0.2, "code2wav": 0.1}),
        ([replace(demand, utilization=0.3) for demand in ONE_OF_EACH], 1, {}),
    ],
)
def test_stages_that_share_a_device_divide_its_memory(
    demands: Sequence[Demand], device_count: int, expected: dict[str, float]
) -> None:
    assert shares(*demands, device_count=device_count) == expected


def test_shares_of_more_than_a_device_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"device 0 have thinker 0\.7 \+ talker 0\.5 = 1\.2, which is more"):
        shares(replace(THINKER, utilization=0.7), replace(TALKER, utilization=0.5), device_count=1)
    with pytest.raises(ConfigError, match=r"^stages\.talker\.engine\.gpu_memory_utilization: thinker 0\.9 leaves noth"):
        shares(replace(THINKER, utilization=0.9), TALKER, device_count=1)


@st.composite
def demands_and_devices(draw: st.DrawFn) -> tuple[list[Demand], int]:
    device_count = draw(st.integers(1, 8))
    demands = [
        Demand(
            stage=f"s{index}",
            replicas=draw(st.integers(1, 4)),
            tensor_parallel=draw(st.integers(1, device_count)),
            need=nominal_need(draw(st.floats(0.05, 1.0))),
        )
        for index in range(draw(st.integers(1, 4)))
    ]
    return demands, device_count


@given(demands_and_devices())
def test_automatic_placement_always_fits(case: tuple[list[Demand], int]) -> None:
    demands, device_count = case
    placed = place(demands, device_count)
    found = shares(*demands, device_count=device_count)
    users: dict[int, list[str]] = {device: [] for device in range(device_count)}
    for demand in demands:
        assert len(placed[demand.stage]) == demand.replicas
        for devices in placed[demand.stage]:
            assert len(set(devices)) == len(devices) == demand.per_replica
            for device in devices:
                users[device].append(demand.stage)
    for stages in users.values():
        if len(stages) > 1:
            total = sum(found[stage] for stage in stages)
            assert total <= SHARED_DEVICE_MEMORY + 1e-6 * len(stages)
            assert all(math.isfinite(found[stage]) and found[stage] >= 0 for stage in stages)


@given(demands_and_devices())
def test_no_device_is_idle_while_another_is_shared_by_single_device_replicas(case: tuple[list[Demand], int]) -> None:
    demands, device_count = case
    placed = place([replace(demand, tensor_parallel=1) for demand in demands], device_count)
    used = [device for replicas in placed.values() for (device,) in replicas]
    assert len(set(used)) == min(len(used), device_count)
