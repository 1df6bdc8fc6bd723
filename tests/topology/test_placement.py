"""Devices and memory shares."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.topology.placement import SHARED_DEVICE_MEMORY, Demand, memory_shares, place

THINKER = Demand(stage="thinker", replicas=1, share=0.6)
TALKER = Demand(stage="talker", replicas=1, share=0.2)
CODE2WAV = Demand(stage="code2wav", replicas=1, share=0.1)
ONE_OF_EACH = (THINKER, TALKER, CODE2WAV)


@pytest.mark.parametrize(
    ("device_count", "thinker", "talker", "code2wav"),
    [(1, 0, 0, 0), (2, 0, 1, 1), (3, 0, 1, 2), (8, 0, 1, 2)],
)
def test_automatic_spreads(device_count: int, thinker: int, talker: int, code2wav: int) -> None:
    placed = place(ONE_OF_EACH, device_count)
    assert placed == {"thinker": ((thinker,),), "talker": ((talker,),), "code2wav": ((code2wav,),)}


def test_the_largest_stage_keeps_a_device_for_itself() -> None:
    placed = place((THINKER, replace(TALKER, replicas=2), replace(CODE2WAV, replicas=2)), 2)
    assert placed == {"thinker": ((0,),), "talker": ((1,), (1,)), "code2wav": ((1,), (1,))}


def test_tensor_parallel_replicas_get_whole_groups() -> None:
    placed = place((replace(THINKER, tensor_parallel=2), replace(TALKER, replicas=2)), 4)
    assert placed == {"thinker": ((0, 1),), "talker": ((2,), (3,))}


def test_written_devices_count_for_the_others() -> None:
    placed = place((replace(THINKER, devices="1"), TALKER, CODE2WAV), 2)
    assert placed == {"thinker": ((1,),), "talker": ((0,),), "code2wav": ((0,),)}
    placed = place((THINKER, replace(TALKER, devices="0"), CODE2WAV), 3)
    assert placed == {"thinker": ((1,),), "talker": ((0,),), "code2wav": ((2,),)}


@pytest.mark.parametrize(
    ("demand", "devices"),
    [
        (replace(TALKER, devices="2"), ((2,),)),
        (replace(TALKER, devices="1", replicas=3), ((1,), (2,), (3,))),
        (replace(TALKER, devices="2,2,2", replicas=3), ((2,), (2,), (2,))),
        (replace(TALKER, devices="2,0", replicas=2), ((2,), (0,))),
        (replace(TALKER, devices="1,1", replicas=2), ((1,), (1,))),
        (replace(TALKER, devices="3,1", tensor_parallel=2), ((3, 1),)),
        (replace(TALKER, devices="0,1", tensor_parallel=2, replicas=2), ((0, 1), (2, 3))),
        (replace(TALKER, devices="1,0", pipeline_parallel=2, replicas=2), ((1, 0), (3, 2))),
        (replace(TALKER, devices="2,3,2,3", tensor_parallel=2, replicas=2), ((2, 3), (2, 3))),
        (replace(TALKER, devices="0,2,1,3", tensor_parallel=2, replicas=2), ((0, 2), (1, 3))),
        (replace(TALKER, devices="0,1,2,3", tensor_parallel=2, replicas=2), ((0, 1), (2, 3))),
        (replace(TALKER, devices="0,1,2,3", tensor_parallel=2, pipeline_parallel=2), ((0, 1, 2, 3),)),
    ],
)
def test_written_devices(demand: Demand, devices: tuple[tuple[int, ...], ...]) -> None:
    assert place((demand,), 4) == {"talker": devices}


@pytest.mark.parametrize(
    ("demand", "message"),
    [
        (
            replace(TALKER, devices="0,1,2", tensor_parallel=2, replicas=2),
            "stages.talker.devices: 2 replicas x tensor_parallel_size 2 = 4 devices, but '0,1,2' names 3; "
            "write 4, or 2 for the first replica",
        ),
        (
            replace(TALKER, devices="0,1"),
            "stages.talker.devices: 1 replica x tensor_parallel_size 1 = 1 devices, but '0,1' names 2",
        ),
        (
            replace(TALKER, devices="0", tensor_parallel=2, pipeline_parallel=2),
            "stages.talker.devices: 1 replica x tensor_parallel_size 2 x pipeline_parallel_size 2 = 4 devices, "
            "but '0' names 1",
        ),
        (
            replace(TALKER, devices="4"),
            "stages.talker.devices: device 4 does not exist; this machine has devices 0 to 3",
        ),
        (
            replace(TALKER, devices="0,4", replicas=2),
            "stages.talker.devices: device 4 does not exist; this machine has devices 0 to 3",
        ),
        (
            replace(TALKER, devices="0,1", tensor_parallel=2, replicas=3),
            "stages.talker.devices: 3 replicas x tensor_parallel_size 2 = 6 devices; '0,1' for the first makes '0,1' "
            "and '2,3' and '4,5', but this machine has devices 0 to 3; write all 6 to place them differently or to "
            "share",
        ),
        (
            replace(TALKER, devices="3", replicas=2),
            "stages.talker.devices: 2 replicas x tensor_parallel_size 1 = 2 devices; '3' for the first makes '3' and "
            "'4', but this machine has devices 0 to 3; write all 2 to place them differently or to share",
        ),
        (
            replace(TALKER, devices="0,2", tensor_parallel=2, replicas=2),
            "stages.talker.devices: 2 replicas x tensor_parallel_size 2 = 4 devices; '0,2' for the first makes '0,2' "
            "and '2,4', but this machine has devices 0 to 3; write all 4 to place them differently or to share",
        ),
        (
            replace(TALKER, devices="1,3", pipeline_parallel=2, replicas=2),
            "stages.talker.devices: 2 replicas x tensor_parallel_size 1 x pipeline_parallel_size 2 = 4 devices; '1,3' "
            "for the first makes '1,3' and '3,5', but this machine has devices 0 to 3; write all 4 to place them "
            "differently or to share",
        ),
        (
            replace(TALKER, devices="1,1", tensor_parallel=2, replicas=2),
            "stages.talker.devices: a replica would have the same device twice ('1,1'); name different ones",
        ),
        (
            replace(TALKER, devices="1,1", tensor_parallel=2),
            "stages.talker.devices: a replica would have the same device twice ('1,1'); name different ones",
        ),
        (
            replace(TALKER, tensor_parallel=8),
            "stages.talker: a replica needs 8 devices (tensor_parallel_size 8), but this machine has 4",
        ),
    ],
)
def test_wrong_counts_do_the_arithmetic(demand: Demand, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        place((demand,), 4)
    assert str(caught.value) == message


def test_a_template_whose_replicas_overlap() -> None:
    with pytest.raises(ConfigError) as caught:
        place((replace(TALKER, devices="0,2", tensor_parallel=2, replicas=2),), 8)
    assert str(caught.value) == (
        "stages.talker.devices: 2 replicas x tensor_parallel_size 2 = 4 devices; '0,2' for the first makes '0,2' and "
        "'2,4', which are not 4 different ones; write all 4"
    )


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 4))
def test_a_template_gives_every_replica_its_own(replicas: int, size: int, first: int) -> None:
    text = ",".join(str(first + at) for at in range(size))
    demand = replace(TALKER, devices=text, tensor_parallel=size, replicas=replicas)
    placed = place((demand,), first + replicas * size)["talker"]
    assert [device for devices in placed for device in devices] == list(range(first, first + replicas * size))


def test_a_stage_without_replicas_takes_nothing() -> None:
    """Whatever is written for it: the same file serves all hosts."""
    gone = replace(TALKER, replicas=0, devices="7", tensor_parallel=8)
    automatic = replace(CODE2WAV, replicas=0, tensor_parallel=8)
    placed = place((THINKER, gone, automatic), 1)
    assert placed == {"thinker": ((0,),), "talker": (), "code2wav": ()}
    assert memory_shares((THINKER, gone, automatic), placed) == {}


def test_only_one_device() -> None:
    with pytest.raises(ConfigError, match=r"device 1 does not exist; this machine has only device 0$"):
        place((replace(TALKER, devices="1"),), 1)


def shares(*demands: Demand, device_count: int) -> dict[str, float]:
    return memory_shares(demands, place(demands, device_count))


def test_all_on_one_device() -> None:
    assert shares(*ONE_OF_EACH, device_count=1) == {"thinker": 0.6, "talker": 0.2, "code2wav": 0.1}


def test_alone_is_left_to_vllm() -> None:
    assert shares(*ONE_OF_EACH, device_count=3) == {}
    assert shares(*ONE_OF_EACH, device_count=2) == {"talker": 0.6, "code2wav": 0.3}


def test_several_replicas_on_one_device() -> None:
    found = shares(THINKER, replace(TALKER, replicas=2), replace(CODE2WAV, replicas=2), device_count=1)
    assert found == {"thinker": 0.45, "talker": 0.15, "code2wav": 0.075}


def test_a_stage_has_the_value_of_its_fullest_device() -> None:
    found = shares(replace(THINKER, devices="0"), replace(TALKER, replicas=2, devices="0,1"), device_count=2)
    assert found == {"thinker": 0.675, "talker": 0.225}


def test_the_users_value_is_taken_off_first() -> None:
    found = shares(replace(THINKER, utilization=0.6), TALKER, CODE2WAV, device_count=1)
    assert found == {"talker": 0.2, "code2wav": 0.1}
    assert shares(*(replace(d, utilization=0.3) for d in ONE_OF_EACH), device_count=1) == {}


def test_too_much_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"device 0 is shared and thinker 0\.7 \+ talker 0\.5 = 1\.2 is more than 1"):
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
            share=draw(st.floats(0.05, 1.0)),
        )
        for index in range(draw(st.integers(1, 4)))
    ]
    return demands, device_count


@given(demands_and_devices())
def test_automatic_placement_always_fits(case: tuple[list[Demand], int]) -> None:
    demands, device_count = case
    placed = place(demands, device_count)
    found = memory_shares(demands, placed)
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
