"""Routing within one stage."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from vllm_omni_ext.errors import StageUnavailable, UnknownMember
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.pool.stage_pool import StagePool

A, B, C = (ReplicaId("talker", i) for i in range(3))
OTHER = ReplicaId("thinker", 0)


class First:
    """Takes the first candidate and notes what it was shown."""

    def __init__(self) -> None:
        self.shown: list[dict[ReplicaId, int]] = []

    def pick(self, candidates, load) -> ReplicaId:
        self.shown.append(dict(load))
        return candidates[0]


def test_a_request_stays_where_it_is() -> None:
    pool = StagePool("talker", [A, B])
    where = pool.admit("r")
    assert [pool.admit("r") for _ in range(5)] == [where] * 5
    assert pool.replica_of("r") == where
    assert (pool.in_flight(A), pool.in_flight(B)) in ((1, 0), (0, 1))


def test_requests_are_spread() -> None:
    pool = StagePool("talker", [A, B, C])
    for i in range(9):
        pool.admit(str(i))
    assert [pool.in_flight(r) for r in pool.replicas] == [3, 3, 3]


def test_the_policy_decides_and_sees_the_load() -> None:
    policy = First()
    pool = StagePool("talker", [A, B], policy)
    assert [pool.admit(r) for r in ("x", "y")] == [A, A]
    assert policy.shown == [{A: 0, B: 0}, {A: 1, B: 0}]


def test_release_says_where_it_was_and_only_once() -> None:
    pool = StagePool("talker", [A])
    pool.admit("r")
    assert pool.release("r") == A
    assert pool.release("r") is None
    assert pool.release("unknown") is None
    assert (pool.replica_of("r"), pool.in_flight(A)) == (None, 0)


def test_removing_a_replica_unbinds_its_requests_only() -> None:
    pool = StagePool("talker", [A, B])
    where = {r: pool.admit(r) for r in ("z", "y", "x", "w")}
    assert pool.remove(A) == tuple(sorted(r for r, at in where.items() if at == A))
    assert pool.replicas == (B,)
    assert {r: pool.replica_of(r) for r in where} == {r: at if at == B else None for r, at in where.items()}
    assert pool.admit("z") == B


def test_an_empty_pool_says_so() -> None:
    pool = StagePool("talker", [A])
    pool.admit("r")
    pool.remove(A)
    for request in ("r", "new"):
        with pytest.raises(StageUnavailable, match="'talker' has no live replica"):
            pool.admit(request)
    assert pool.replica_of("new") is None


@pytest.mark.parametrize("replica", [OTHER, ReplicaId("talker", 7)], ids=str)
def test_replicas_of_others_are_refused_by_name(replica: ReplicaId) -> None:
    pool = StagePool("talker", [A, B])
    for ask in (pool.in_flight, pool.remove):
        with pytest.raises(UnknownMember, match=f"'{replica}'.*live: talker/0, talker/1"):
            ask(replica)
    with pytest.raises(UnknownMember, match="live: none"):
        StagePool("talker", []).remove(A)


class PoolMachine(RuleBasedStateMachine):
    """Any order of calls, against a plain dictionary."""

    requests = st.sampled_from([f"r{i}" for i in range(6)])

    @initialize(count=st.integers(1, 3))
    def start(self, count: int) -> None:
        self.pool = StagePool("talker", [ReplicaId("talker", i) for i in range(count)])
        self.live = {ReplicaId("talker", i) for i in range(count)}
        self.where: dict[str, ReplicaId] = {}

    @rule(request=requests)
    def admit(self, request: str) -> None:
        if not self.live:
            with pytest.raises(StageUnavailable):
                self.pool.admit(request)
            return
        least = min(self.load().values())
        known, got = self.where.get(request), self.pool.admit(request)
        assert got == known if known else self.load()[got] == least
        self.where[request] = got

    @rule(request=requests)
    def release(self, request: str) -> None:
        assert self.pool.release(request) == self.where.pop(request, None)

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        if self.live:
            replica = data.draw(st.sampled_from(sorted(self.live)))
            self.live.discard(replica)
            lost = [r for r, at in self.where.items() if at == replica]
            assert self.pool.remove(replica) == tuple(sorted(lost))
            for request in lost:
                del self.where[request]

    def load(self) -> dict[ReplicaId, int]:
        return {replica: list(self.where.values()).count(replica) for replica in self.live}

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "pool"):
            assert set(self.pool.replicas) == self.live
            assert {r: self.pool.in_flight(r) for r in self.live} == self.load()
            assert all(self.pool.replica_of(f"r{i}") == self.where.get(f"r{i}") for i in range(6))


PoolMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
TestPoolMachine = PoolMachine.TestCase
