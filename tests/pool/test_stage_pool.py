"""Routing within one stage."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.support.examples import examples
from vllm_omni_ext.errors import StageUnavailable, UnknownMember
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.pool.affinity import Affinity
from vllm_omni_ext.pool.load import Load
from vllm_omni_ext.pool.stage_pool import SLACK, StagePool

A, B, C = (ReplicaId("talker", i) for i in range(3))
OTHER = ReplicaId("thinker", 0)


class First:
    """Takes the first candidate and records the loads that it receives."""

    def __init__(self) -> None:
        self.shown: list[dict[ReplicaId, int]] = []

    def pick(self, load) -> ReplicaId:
        self.shown.append(dict(load))
        return next(iter(load))


def test_the_policy_gets_loads_that_assume_other_api_servers_to_have_the_same() -> None:
    policy, counts = First(), list[tuple[ReplicaId, int]]()
    pool = StagePool("talker", [A, B], policy, clients=2, changed=lambda *each: counts.append(each))
    assert [pool.admit(r) for r in ("x", "y")] == [A, A]
    assert policy.shown == [{A: 0, B: 0}, {A: 2.0, B: 0}]
    assert (pool.load(A), pool.load(B), pool.load(C)) == (4.0, 0.0, 0.0)
    pool.drain(A)
    assert pool.load(A) == 2.0
    pool.release("x")
    assert counts == [(A, 1), (A, 2), (A, 1)]


@pytest.mark.parametrize("replica", [OTHER, ReplicaId("talker", 7)], ids=str)
def test_unknown_replicas_are_refused_by_name(replica: ReplicaId) -> None:
    pool = StagePool("talker", [A, B])
    for ask in (pool.in_flight, pool.remove, pool.drain, pool.avoid):
        with pytest.raises(UnknownMember, match=f"'{replica}'.*live: talker/0, talker/1"):
            ask(replica)
    with pytest.raises(UnknownMember, match="live: none"):
        StagePool("talker", []).remove(A)


def test_a_replica_of_another_stage_cannot_be_added() -> None:
    pool = StagePool("talker", [A])
    for add in (pool.add, lambda replica: StagePool("talker", [replica])):
        with pytest.raises(UnknownMember, match="'thinker/0' is no replica of stage 'talker'"):
            add(OTHER)
    assert pool.replicas == (A,)


def test_a_published_load_counts_until_it_is_withdrawn() -> None:
    pool = StagePool("talker", [A, B])
    pool.publish({A: Load(running=5), B: Load(running=2)})
    assert [pool.admit(str(i)) for i in range(3)] == [B] * 3
    assert {pool.admit("x"), pool.admit("y")} == {A, B}
    pool.publish({})
    assert pool.admit("z") == A, "an old report still counts"


def test_a_repeated_report_does_not_hide_requests_sent_since() -> None:
    pool = StagePool("talker", [A, B])
    first = {A: Load(running=10, report=1), B: Load(running=13, report=1)}
    pool.publish(first)
    for i in range(3):
        assert pool.admit(str(i)) == A
        pool.publish(first)
    assert {pool.admit("3"), pool.admit("4")} == {A, B}
    pool.publish({A: Load(running=10, report=2), B: Load(running=13, report=1)})
    assert pool.admit("5") == A


def test_reports_of_unknown_replicas_are_refused_and_change_nothing() -> None:
    pool = StagePool("talker", [A, B])
    with pytest.raises(UnknownMember):
        pool.publish({A: Load(running=9), C: Load()})
    assert {pool.admit(str(i)) for i in range(2)} == {A, B}


def test_an_avoided_replica_is_used_when_there_is_no_other() -> None:
    pool = StagePool("talker", [A, B])
    pool.avoid(A)
    assert {pool.admit(str(i)) for i in range(4)} == {B}
    pool.drain(B)
    assert pool.admit("x") == A
    pool.drain(A)
    with pytest.raises(StageUnavailable, match="'talker' is draining: all its replicas are"):
        pool.admit("y")


def test_a_sleeping_replica_is_used_when_no_other_is_awake() -> None:
    zero, one, two = A, B, C
    pool = StagePool("talker", [A, B, C])
    pool.rest(zero)
    pool.avoid(one)
    assert {pool.admit(f"a{i}") for i in range(4)} == {two}
    pool.rest(two)
    assert pool.admit("b") == one, "an avoided one works, a sleeping one does not"
    pool.drain(one)
    assert {pool.admit(f"c{i}") for i in range(8)} == {zero, two}, "they wait"
    pool.add(zero)
    pool.rouse(two)
    assert {pool.admit(f"d{i}") for i in range(8)} == {two}, "opening does not wake"
    pool.remove(zero)
    pool.add(zero)
    pool.rest(two)
    assert pool.admit("e") == zero, "who comes back is awake"
    with pytest.raises(UnknownMember):
        pool.rest(ReplicaId("talker", 7))


def test_requests_of_a_session_or_with_a_media_item_go_to_one_replica() -> None:
    pool = StagePool("talker", [A, B, C])
    where = pool.admit("1", session="s", media=["cat"])
    assert [pool.admit(f"s{i}", session="s") for i in range(3)] == [where] * 3
    assert [pool.admit(f"m{i}", media=["dog", "cat"]) for i in range(3)] == [where] * 3
    assert pool.admit("session first", session="cat") != where
    pool.drain(where)
    moved = pool.admit("2", session="s")
    assert moved != where
    pool.add(where)
    assert pool.admit("3", session="s") == moved


def test_affinity_does_not_overload_a_replica() -> None:
    pool = StagePool("talker", [A, B])
    for i in range(200):
        pool.admit(str(i), media=["the same picture"])
    assert abs(pool.in_flight(A) - pool.in_flight(B)) <= SLACK + 1


def test_affinity_is_bounded_and_ends_with_the_replica() -> None:
    affinity = Affinity(limit=10)
    pool = StagePool("talker", [A, B], affinity=affinity)
    for i in range(100):
        pool.admit(str(i), session=str(i), media=["x" * 1000, str(i)])
    assert len(affinity) == 10
    pool.remove(A)
    pool.remove(B)
    assert len(affinity) == 0


class PoolMachine(RuleBasedStateMachine):
    """Any order of calls, compared with a plain dictionary."""

    requests = st.sampled_from([f"r{i}" for i in range(6)])

    @initialize(count=st.integers(1, 3))
    def start(self, count: int) -> None:
        self.pool = StagePool("talker", [ReplicaId("talker", i) for i in range(count)])
        self.live = {ReplicaId("talker", i) for i in range(count)}
        self.draining: set[ReplicaId] = set()
        self.where: dict[str, ReplicaId] = {}
        assert self.pool.release("unknown") is None

    @rule(index=st.integers(0, 3))
    def add(self, index: int) -> None:
        self.pool.add(ReplicaId("talker", index))
        self.live.add(ReplicaId("talker", index))
        self.draining.discard(ReplicaId("talker", index))

    @rule(data=st.data())
    def drain(self, data: st.DataObject) -> None:
        if self.live:
            replica = data.draw(st.sampled_from(sorted(self.live)))
            self.pool.drain(replica)
            self.draining.add(replica)

    @rule(request=requests)
    def admit(self, request: str) -> None:
        if not self.live:
            with pytest.raises(StageUnavailable, match="no live replica"):
                self.pool.admit(request)
            return
        known = self.where.get(request)
        if known is None and self.draining == self.live:
            with pytest.raises(StageUnavailable, match="draining"):
                self.pool.admit(request)
            return
        least = min((load for replica, load in self.load().items() if replica not in self.draining), default=0)
        got = self.pool.admit(request)
        assert got == known if known else (self.load()[got] == least and got not in self.draining)
        self.where[request] = got

    @rule(request=requests)
    def release(self, request: str) -> None:
        assert self.pool.release(request) == self.where.pop(request, None)

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        if self.live:
            replica = data.draw(st.sampled_from(sorted(self.live)))
            self.live.discard(replica)
            self.draining.discard(replica)
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


PoolMachine.TestCase.settings = settings(max_examples=examples(25), stateful_step_count=20, deadline=None)
TestPoolMachine = PoolMachine.TestCase


def test_the_reason_of_a_decision_is_reported() -> None:
    told: list[tuple[ReplicaId, str]] = []
    pool = StagePool("talker", [A], decided=lambda *each: told.append(each))
    pool.admit("a", session="s")
    pool.admit("a", session="s")
    pool.add(B)
    pool.admit("b")
    pool.admit("c", session="s")
    assert told == [(A, "only"), (B, "policy"), (A, "affinity")]
