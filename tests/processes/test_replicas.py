"""Two replicas a stage answer as one does; losing one of them loses no request, and the replica comes back."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams

from tests.processes.test_parity import CASES, TOLERANCE, answer, check, heard, seen, user
from tests.support.cluster import STAGES, until
from tests.support.media import openai_messages
from tests.support.oracle import Golden, Oracle
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.pool.stage_pool import LeastQueueLength, Random, RoundRobin

pytestmark = pytest.mark.engine

REPLICAS = {ReplicaId(stage, index) for stage in STAGES for index in range(2)}
POLICIES = {"thinker": LeastQueueLength, "talker": RoundRobin, "code2wav": Random}
PROMPTS = [
    [user("Tell me a long story.")],
    [user("hello world")],
    [user(heard(1.0, 1), "What do you hear?")],
    [user(seen(96, 64, 2), "What is this?")],
    [user("Count to a hundred.")],
    [user("word " * 100)],
]
GREEDY = {
    "thinker": SamplingParams(temperature=0, max_tokens=80, ignore_eos=True),
    "talker": SamplingParams(temperature=0, repetition_penalty=1.05, min_tokens=100, max_tokens=120),
}
SEEDED = {
    "thinker": SamplingParams(temperature=1, top_p=0.9, seed=3, max_tokens=80, ignore_eos=True),
    "talker": SamplingParams(temperature=0.9, top_k=50, seed=5, min_tokens=100, max_tokens=120),
}
UNDER_WAY = 20
BUSY_WITHIN_S, BACK_WITHIN_S, ANSWER_S = 20.0, 60.0, 120.0


@pytest.fixture(scope="module")
def undisturbed(twofold: Any) -> list[Any]:
    return answers(twofold)


def answers(omni: Any, count: int = len(PROMPTS)) -> list[Any]:
    """Send so many requests at once, every other one with seeds; the prompts take turns."""
    sampling = [SEEDED if number % 2 else GREEDY for number in range(count)]
    prompts = itertools.islice(itertools.cycle(PROMPTS), count)
    outputs = omni.chat([openai_messages(case) for case in prompts], sampling, use_tqdm=False)
    return [(o.error, o.outputs[0].token_ids, o.frames.tolist(), o.audio) for o in outputs]


def same(one: list[Any], other: list[Any]) -> bool:
    """Return whether answers are equal, samples up to rounding: the batches of code2wav depend on time."""
    sounds = [(a[-1], b[-1]) for a, b in zip(one, other, strict=True)]
    return [a[:-1] for a in one] == [b[:-1] for b in other] and all(
        a.shape == b.shape and np.abs(a - b).max() <= TOLERANCE for a, b in sounds
    )


def restarts(omni: Any, stage: str) -> dict[ReplicaId, int]:
    return {each: about.restarts for each, about in omni._omni.replica_connections.about.items() if each.stage == stage}


def within(omni: Any, stage: str, method: str, *args: Any) -> list[Any]:
    """Return the results of a method in all workers of a stage."""
    replies = omni.collective_rpc(method, args=args, targets=[stage])
    return [value for reply in replies.values() for value in reply.value]


def hidden_states_held(omni: Any) -> int:
    """Return the number of requests whose hidden states a thinker keeps or a talker has taken."""
    return sum(
        n or 0 for n in (*within(omni, "thinker", "hidden_states_held"), *within(omni, "talker", "hidden_states_open"))
    )


def busy(omni: Any, stage: str) -> ReplicaId | None:
    """Return a replica of the stage that has a request."""
    pool = omni._omni.orchestrator.pools[stage]
    return next((replica for replica in pool.replicas if pool.in_flight(replica)), None)


def wait_busy(omni: Any, stage: str) -> ReplicaId:
    """Return a replica of the stage once it has a request."""
    found: list[ReplicaId | None] = []

    def look() -> bool:
        found.append(busy(omni, stage))
        return found[-1] is not None

    assert until(look, BUSY_WITHIN_S) and found[-1] is not None
    return found[-1]


def wait_under_way(omni: Any, stage: str, tokens: int = UNDER_WAY, within_s: float = BUSY_WITHIN_S) -> ReplicaId:
    """Return a replica of thinker or talker once a seeded request has so many tokens of it."""
    found: list[ReplicaId] = []

    def look() -> bool:
        for state in list(omni._omni.orchestrator.machine.requests.values()):
            prompt, talker = state.prompts.get(state.request_id), state.bindings.get(("talker", ""))
            if stage == "thinker" and prompt is not None:
                binding, made, seed = prompt, len(prompt.tokens), state.client.request.sampling_params.seed
            elif stage == "talker" and talker is not None:
                binding, made, seed = talker, state.flow._voice.frames.count, state.options.params["talker"].seed
            else:
                continue
            if binding.replica is not None and made >= tokens and seed is not None:
                found.append(binding.replica)
        return bool(found)

    assert until(look, within_s)
    return found[0]


def both_up(omni: Any, stage: str) -> bool:
    return set(omni._omni.orchestrator.pools[stage].replicas) == {each for each in REPLICAS if each.stage == stage}


def test_answers_equal_the_oracles_through_all_replicas(
    twofold: Any, oracle: Oracle, expected: dict[str, Golden]
) -> None:
    """Each stage has another policy; which replica a policy picks is tested in `tests/pool`."""
    pools = twofold._omni.orchestrator.pools
    assert {stage: type(pools[stage]._policy) for stage in STAGES} == POLICIES
    assert set(twofold._deployment.processes()) == REPLICAS
    picked = Counter[ReplicaId]()
    for pool in pools.values():
        pool._decided = lambda replica, why, decided=pool._decided: (picked.update([replica]), decided(replica, why))
    for names in (list(CASES)[:4], list(CASES)):
        for name, output in zip(names, answer(twofold, oracle, names), strict=True):
            check(output, expected[name])
    assert set(picked) == REPLICAS
    assert twofold._omni.orchestrator.held() == 0


@pytest.mark.parametrize(
    "stage",
    ["talker", *(pytest.param(each, marks=pytest.mark.extended) for each in ("code2wav", "thinker"))],
)
def test_no_request_is_lost_when_a_replica_dies(stage: str, twofold: Any, undisturbed: list[Any]) -> None:
    got: list[Any] = []
    asking = threading.Thread(target=lambda: got.extend(answers(twofold)))
    asking.start()
    gone = wait_busy(twofold, stage) if stage == "code2wav" else wait_under_way(twofold, stage)
    before = restarts(twofold, stage)
    os.kill(twofold._deployment.processes()[gone].pid, signal.SIGKILL)
    asking.join(ANSWER_S)
    assert same(got, undisturbed) and all(error is None for error, *_ in got)
    assert until(lambda: twofold._omni.orchestrator.held() == 0)
    assert until(lambda: both_up(twofold, stage), BACK_WITHIN_S)
    assert restarts(twofold, stage) == {each: before[each] + int(each == gone) for each in before}
    assert same(answers(twofold), undisturbed)
    assert until(lambda: hidden_states_held(twofold) == 0)


def test_garbage_collection_does_not_block_on_a_lost_replica() -> None:
    """Last: it collects the clients of the killed replicas, with their sockets and contexts."""
    collecting = threading.Thread(target=gc.collect, daemon=True)
    collecting.start()
    collecting.join(BUSY_WITHIN_S)
    assert not collecting.is_alive()
