"""Load balancing policies, and the estimated load that they get."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.pool.load import Load, estimate
from vllm_omni_ext.pool.stage_pool import POLICIES, LeastQueueLength, Random, RoundRobin, policy

REPLICAS = [ReplicaId("talker", i) for i in range(5)]
loads = st.lists(st.integers(0, 9), min_size=1, max_size=5)


@given(loads, st.integers(0, 20))
def test_the_least_loaded_replica_is_picked(load: list[int], turns: int) -> None:
    least, known = LeastQueueLength(), dict(zip(REPLICAS, load, strict=False))
    for _ in range(turns + 1):
        assert known[least.pick(known)] == min(load)


@pytest.mark.parametrize("kind", [LeastQueueLength, RoundRobin])
@given(count=st.integers(1, 5), start=st.integers(0, 7))
def test_equally_loaded_replicas_take_turns(kind, count: int, start: int) -> None:
    chooser, candidates = kind(start), REPLICAS[:count]
    idle = dict.fromkeys(candidates, 0.0)
    first = start % count
    assert [chooser.pick(idle) for _ in range(2 * count)] == (candidates[first:] + candidates[:first]) * 2


@given(loads)
def test_round_robin_ignores_the_load(load: list[int]) -> None:
    known = dict(zip(REPLICAS, load, strict=False))
    chooser = RoundRobin()
    assert Counter(chooser.pick(known) for _ in range(3 * len(known))) == dict.fromkeys(known, 3)


def test_random_picks_all_replicas_and_repeats_with_a_seed() -> None:
    idle = dict.fromkeys(REPLICAS, 0.0)
    one, two = Random(1), Random(1)
    picks = [one.pick(idle) for _ in range(500)]
    assert picks == [two.pick(idle) for _ in range(500)]
    assert min(Counter(picks).values()) > 60 and set(picks) == set(REPLICAS)


@pytest.mark.parametrize("name", POLICIES)
def test_a_replica_that_joins_late_is_picked(name: str) -> None:
    chooser = policy(name)
    for _ in range(3):
        chooser.pick({REPLICAS[0]: 0.0})
    idle = dict.fromkeys(REPLICAS[:2], 0.0)
    assert {chooser.pick(idle) for _ in range(40)} == set(REPLICAS[:2])


def test_policies_are_made_by_name() -> None:
    kinds = [type(policy(name)) for name in ("random", "round-robin", "least-queue-length")]
    assert [*kinds, type(policy())] == [Random, RoundRobin, LeastQueueLength, LeastQueueLength]
    with pytest.raises(ConfigError, match=r"'rand' is not a .* use one of least-queue-length, random, round-robin"):
        policy("rand")


@pytest.mark.parametrize(
    ("published", "then", "own", "clients", "score"),
    [
        (None, 0, 3, 2, 6.0),  # own requests alone
        (Load(0, 5), 2, 2, 1, 5.0),  # others are using it too
        (Load(0, 5), 2, 4, 1, 7.0),  # and it was given two more since
        (Load(0, 5), 2, 1, 1, 4.0),  # or has finished one
        (Load(0, 5), 0, 2, 3, 11.0),  # other API servers have done the same
        (Load(0, 1), 0, 5, 2, 11.0),
        (Load(0, 0), 3, 3, 2, 6.0),  # the report is older than the own counts
        (Load(4, 4, 0.5), 0, 0, 1, 8.0),  # a queue before a cache with room
        (Load(4, 4, 1.0), 0, 0, 1, 20.0),  # before a full one each counts four times
        (Load(0, 4, 1.0), 0, 0, 1, 4.0),
    ],
)
def test_the_estimated_load_of_a_replica(published, then: int, own: int, clients: int, score: float) -> None:
    assert estimate(published, then, own, clients) == score


counts = st.integers(0, 50)


@given(counts, counts, st.floats(0, 1), counts, counts, st.integers(1, 8))
def test_one_more_request_never_makes_a_replica_look_less_loaded(
    waiting: int, running: int, kv: float, then: int, own: int, clients: int
) -> None:
    load = Load(waiting, running, kv)
    assert estimate(load, then, own, clients) <= estimate(load, then, own + 1, clients)
    assert estimate(load, then, own, clients) >= clients * own
