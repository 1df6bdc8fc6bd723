"""Calls that name stages and replicas, against real engines."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from vllm import LLM, SamplingParams

from tests.processes.test_parity import TOLERANCE
from vllm_omni_ext.errors import CallFailed, StageUnavailable, UnknownMember
from vllm_omni_ext.ids import ReplicaId

pytestmark = pytest.mark.engine

TALKERS = [ReplicaId("talker", 0), ReplicaId("talker", 1)]
ALL = [ReplicaId("thinker", 0), *TALKERS, ReplicaId("code2wav", 0)]
SAMPLING = {
    "thinker": SamplingParams(temperature=0, max_tokens=8, ignore_eos=True),
    "talker": SamplingParams(temperature=0, max_tokens=12, min_tokens=12),
}
LONG = {**SAMPLING, "talker": SamplingParams(temperature=0, max_tokens=1500, min_tokens=1400)}
WAITS_S = 1.0
SOON_S = 60.0


@pytest.fixture(scope="module")
def omni(tiny: Path) -> Iterator[Any]:
    with LLM(str(tiny), omni=True, max_model_len=2048, stage_overrides={"talker": {"replicas": 2}}) as llm:
        yield llm


ASLEEP_S = 120.0
"""Longest time of a call that waits for running requests."""


def values(replies: Any) -> dict[ReplicaId, Any]:
    assert not any(reply.error for reply in replies.values()), replies
    return {replica: reply.value for replica, reply in replies.items()}


def asleep(omni: Any) -> list[ReplicaId]:
    return [
        replica
        for replica, sleeps in values(omni.is_sleeping(targets=["thinker", "talker", "code2wav"])).items()
        if sleeps
    ]


def spoken(omni: Any, sampling: Any = SAMPLING) -> Any:
    [output] = omni.chat([{"role": "user", "content": "Tell me about the moon"}], sampling, use_tqdm=False)
    return output


def alike(one: Any, other: Any) -> bool:
    """Whether two answers without an error are equal; sound up to rounding, as parts' bounds may differ."""
    return (
        one.error is None
        and other.error is None
        and one.audio.shape == other.audio.shape
        and bool(np.abs(one.audio - other.audio).max() <= TOLERANCE)
    )


def asking(omni: Any, sampling: Any = SAMPLING) -> tuple[threading.Thread, list[Any]]:
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(spoken(omni, sampling)), daemon=True)
    thread.start()
    return thread, got


def busy(omni: Any, stage: str) -> ReplicaId:
    """The replica of a stage that has a request, once one has."""
    deadline = time.monotonic() + SOON_S
    pool = omni._omni.orchestrator.pools[stage]
    while not (found := [replica for replica in pool.replicas if pool.in_flight(replica)]):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return found[0]


def asking_in(omni: Any, stage: str) -> tuple[threading.Thread, list[Any]]:
    """A request that is in a stage. One that leaves the stage between two looks is made again."""
    deadline = time.monotonic() + SOON_S
    pool = omni._omni.orchestrator.pools[stage]
    while time.monotonic() < deadline:
        thread, got = asking(omni)
        while thread.is_alive():
            if any(pool.in_flight(replica) for replica in pool.replicas):
                return thread, got
            time.sleep(0.001)
            assert time.monotonic() < deadline, f"a request does not end, and is not in '{stage}'"
    raise AssertionError(f"no request was seen in '{stage}'; the last one: {got}")


def test_a_method_runs_in_the_workers_that_are_named(omni: Any) -> None:
    tasks = values(omni.collective_rpc("get_supported_tasks", targets=["talker/1", "code2wav"]))
    assert list(tasks) == [TALKERS[1], ReplicaId("code2wav", 0)]
    assert tasks[TALKERS[1]] == [["generate"]] and "generate" not in tasks[ReplicaId("code2wav", 0)][0]
    assert "transcription" in omni.collective_rpc("get_supported_tasks")[0], "the text stage"
    assert list(values(omni.collective_rpc("check_health", targets=["talker"]))) == TALKERS
    assert omni.collective_rpc("check_health") == [None], "the text stage has one worker"


def test_a_method_that_no_worker_has_fails_by_replica(omni: Any) -> None:
    replies = omni.collective_rpc("no_such_method", targets=["talker", "code2wav/0"])
    assert list(replies) == [*TALKERS, ReplicaId("code2wav", 0)]
    assert all("no_such_method" in str(reply.error) for reply in replies.values())


@pytest.mark.parametrize("targets", [["vocoder"], ["talker", "talker/2"], []], ids=str)
def test_unknown_targets_are_refused(omni: Any, targets: list[str]) -> None:
    with pytest.raises(UnknownMember, match="stages: thinker, talker, code2wav"):
        omni.sleep(targets=targets)
    assert asleep(omni) == []


def test_caches_are_reset(omni: Any) -> None:
    assert spoken(omni).error is None
    assert values(omni.reset_prefix_cache(targets=["thinker", "talker", "code2wav"])) == dict.fromkeys(ALL, True)
    assert omni.reset_prefix_cache() is True
    for reset in (omni.reset_mm_cache, omni.reset_encoder_cache):
        assert list(values(reset(targets=["thinker"]))) == [ALL[0]]
        assert reset() is None


def test_a_method_that_is_not_enabled_fails_by_replica(omni: Any) -> None:
    replies = omni.list_loras(targets=["talker"])
    assert list(replies) == TALKERS and all(reply.error for reply in replies.values())
    with pytest.raises(CallFailed, match=r"thinker/0: .*[Pp]rofil.*talker/1: .*[Pp]rofil"):
        omni.start_profile()


def test_requests_go_to_the_replica_that_is_awake(omni: Any) -> None:
    before = spoken(omni)
    assert values(omni.sleep(targets=["talker/0"])) == {TALKERS[0]: None}
    assert asleep(omni) == [TALKERS[0]] and omni.is_sleeping()
    for _ in range(3):
        assert alike(spoken(omni), before)
    assert values(omni.wake_up(targets=["talker/0"])) == {TALKERS[0]: True}
    assert asleep(omni) == [] and not omni.is_sleeping()


def test_a_request_to_a_stage_that_sleeps_waits(omni: Any) -> None:
    before = spoken(omni)
    omni.sleep(targets=["talker"])
    thread, got = asking(omni)
    thread.join(WAITS_S)
    assert thread.is_alive()
    omni.wake_up(targets=["talker"])
    thread.join(SOON_S)
    assert alike(got[0], before)


def test_all_stages_sleep_and_wake_up(omni: Any) -> None:
    omni.sleep(level=1)
    assert asleep(omni) == ALL
    assert omni.wake_up() is True
    assert asleep(omni) == [] and spoken(omni).error is None


@pytest.mark.parametrize("mode", ["wait", "keep"])
def test_a_request_survives_the_sleep_of_all_stages(omni: Any, mode: str) -> None:
    before = spoken(omni)
    thread, got = asking_in(omni, "thinker" if mode == "wait" else "talker")
    sleeping = threading.Thread(target=lambda: omni.sleep(level=0, mode=mode), daemon=True)
    sleeping.start()
    sleeping.join(ASLEEP_S)
    assert not sleeping.is_alive(), f"sleep with mode {mode} has not returned; {omni._omni.orchestrator.held()} held"
    assert asleep(omni) == ALL
    omni.wake_up()
    thread.join(SOON_S)
    assert alike(got[0], before)


def test_sleep_ends_running_requests(omni: Any) -> None:
    thread, got = asking(omni, LONG)
    replica = busy(omni, "talker")
    omni.sleep(targets=[str(replica)])
    thread.join(SOON_S)
    assert not thread.is_alive() and "talker" in str(got[0].error)
    omni.wake_up(targets=[str(replica)])
    assert spoken(omni).error is None and omni._omni.orchestrator.held() == 0


def test_a_replica_that_stands_still_and_one_that_dies(omni: Any) -> None:
    """Run last: it costs a replica."""
    process = psutil.Process(omni._deployment.processes()[TALKERS[0]].pid)
    process.suspend()
    replies = omni.is_sleeping(targets=["talker"], timeout_s=WAITS_S)
    assert "no answer within 1 s" in str(replies[TALKERS[0]].error) and replies[TALKERS[1]].value is False
    killing = threading.Timer(WAITS_S, os.kill, (process.pid, signal.SIGKILL))
    killing.start()
    replies = omni.collective_rpc("check_health", targets=["talker"])
    assert str(replies[TALKERS[0]].error) == "replica talker/0 is gone" and replies[TALKERS[1]].value == [None]
    with pytest.raises(UnknownMember, match="talker/0"):
        omni.is_sleeping(targets=["talker/0"])
    os.kill(omni._deployment.processes()[TALKERS[1]].pid, signal.SIGKILL)
    deadline = time.monotonic() + SOON_S
    with pytest.raises(StageUnavailable):  # at first it is one that does not answer any more
        while time.monotonic() < deadline:
            omni.is_sleeping(targets=["talker"])
