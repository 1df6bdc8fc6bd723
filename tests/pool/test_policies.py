"""Which replica a request goes to."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.pool.policies import LeastQueueLength

REPLICAS = [ReplicaId("talker", i) for i in range(5)]
loads = st.lists(st.integers(0, 9), min_size=1, max_size=5)


@given(loads, st.integers(0, 20))
def test_the_least_loaded_is_taken_whoever_had_the_last_turn(load: list[int], turns: int) -> None:
    policy, known = LeastQueueLength(), dict(zip(REPLICAS, load, strict=False))
    candidates = list(known)
    for _ in range(turns + 1):
        assert known[policy.pick(candidates, known)] == min(load)


@given(st.integers(1, 5))
def test_equals_take_turns(count: int) -> None:
    policy, candidates = LeastQueueLength(), REPLICAS[:count]
    idle = dict.fromkeys(candidates, 0)
    assert [policy.pick(candidates, idle) for _ in range(2 * count)] == candidates * 2


def test_one_that_comes_late_is_used() -> None:
    policy = LeastQueueLength()
    for _ in range(3):
        policy.pick(REPLICAS[:1], {REPLICAS[0]: 0})
    idle = dict.fromkeys(REPLICAS[:2], 0)
    assert {policy.pick(REPLICAS[:2], idle) for _ in range(2)} == set(REPLICAS[:2])
