"""Losing one of several replicas costs time, not a request: the others go on where it was, and it comes back."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams

from tests.processes.test_parity import TOLERANCE, heard, seen, user
from tests.support.cluster import until
from tests.support.media import openai_messages
from vllm_omni_ext.ids import ReplicaId

pytestmark = pytest.mark.engine

STAGES = ("thinker", "talker", "code2wav")
CASES = [
    [user("Tell me a long story.")],
    [user("hello world")],
    [user(heard(1.0, 1), "What do you hear?")],
    [user(seen(96, 64, 2), "What is this?")],
    [user("Count to a hundred.")],
    [user("word " * 100)],
]
SAMPLING = {
    "thinker": SamplingParams(temperature=0, max_tokens=150, ignore_eos=True),
    "talker": SamplingParams(temperature=0, repetition_penalty=1.05, min_tokens=200, max_tokens=250),
}
BUSY_WITHIN_S = 20.0
BACK_WITHIN_S = 60.0


@pytest.fixture(scope="module")
def undisturbed(twofold: Any) -> list[Any]:
    return answers(twofold)


def answers(omni: Any) -> list[Any]:
    outputs = omni.chat([openai_messages(case) for case in CASES], SAMPLING, use_tqdm=False)
    return [(o.error, o.outputs[0].token_ids, o.frames.tolist(), o.audio) for o in outputs]


def same(one: list[Any], other: list[Any]) -> bool:
    """Equal, sound up to rounding: which streams share a step of the vocoder is a matter of time."""
    sounds = [(a[-1], b[-1]) for a, b in zip(one, other, strict=True)]
    return [a[:-1] for a in one] == [b[:-1] for b in other] and all(
        a.shape == b.shape and np.abs(a - b).max() <= TOLERANCE for a, b in sounds
    )


def restarts(omni: Any, stage: str) -> dict[ReplicaId, int]:
    return {each: about.restarts for each, about in omni._omni.replica_connections.about.items() if each.stage == stage}


def hidden_states_held(omni: Any) -> int:
    """Requests whose hidden states are kept by a thinker or taken by a talker."""
    return sum(
        n or 0 for n in (*within(omni, "thinker", "hidden_states_held"), *within(omni, "talker", "hidden_states_open"))
    )


def within(omni: Any, stage: str, method: str, *args: Any) -> list[Any]:
    """What each worker of a stage answers."""
    replies = omni.collective_rpc(method, args=args, targets=[stage])
    return [value for reply in replies.values() for value in reply.value]


def busy(omni: Any, stage: str) -> ReplicaId | None:
    """A replica of the stage that has something to do."""
    pool = omni._omni.orchestrator.pools[stage]
    return next((replica for replica in pool.replicas if pool.in_flight(replica)), None)


def test_both_replicas_of_each_stage_are_there(twofold: Any, undisturbed: list[Any]) -> None:
    assert sorted(map(str, twofold._deployment.processes())) == sorted(
        f"{stage}/{i}" for stage in STAGES for i in (0, 1)
    )
    assert all(error is None for error, *_ in undisturbed)


@pytest.mark.parametrize("stage", ["talker", "code2wav", "thinker"])
def test_a_killed_replica_is_not_missed(stage: str, twofold: Any, undisturbed: list[Any]) -> None:
    got: list[Any] = []
    asking = threading.Thread(target=lambda: got.extend(answers(twofold)))
    asking.start()
    deadline = time.monotonic() + BUSY_WITHIN_S
    while (gone := busy(twofold, stage)) is None and time.monotonic() < deadline:
        time.sleep(0.001)
    assert gone is not None
    before = restarts(twofold, stage)
    os.kill(twofold._deployment.processes()[gone].pid, signal.SIGKILL)
    asking.join(120)
    assert same(got, undisturbed)
    assert until(lambda: twofold._omni.orchestrator.held() == 0)

    pool = twofold._omni.orchestrator.pools[stage]
    both = {ReplicaId(stage, 0), ReplicaId(stage, 1)}
    deadline = time.monotonic() + BACK_WITHIN_S
    while set(pool.replicas) != both and time.monotonic() < deadline:
        time.sleep(0.1)
    assert set(pool.replicas) == both
    assert restarts(twofold, stage) == {each: before[each] + int(each == gone) for each in both}
    assert same(answers(twofold), undisturbed)
    assert until(lambda: hidden_states_held(twofold) == 0), "hidden states of media are left by a replica that died"


def test_garbage_collection_does_not_block_on_a_lost_replica() -> None:
    """Run last: what the killed replicas' clients held is collected here, sockets and contexts included."""
    collecting = threading.Thread(target=gc.collect, daemon=True)
    collecting.start()
    collecting.join(BUSY_WITHIN_S)
    assert not collecting.is_alive()
