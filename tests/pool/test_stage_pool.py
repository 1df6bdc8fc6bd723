"""Routing within one stage."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.support.examples import examples
from vllm_omni_ext.errors import StageUnavailable, UnknownMember
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.pool.load import Load
from vllm_omni_ext.pool.stage_pool import SLACK, Affinity, StagePool

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
    assert [pool.admit() for _ in "xy"] == [A, A]
    assert policy.shown == [{A: 0, B: 0}, {A: 2.0, B: 0}]
    assert (pool.load(A), pool.load(B), pool.load(C)) == (4.0, 0.0, 0.0)
    pool.drain(A)
    assert pool.load(A) == 2.0
    pool.release(A)
    assert counts == [(A, 1), (A, 2), (A, 1)]


@pytest.mark.parametrize("replica", [OTHER, ReplicaId("talker", 7)], ids=str)
def test_unknown_replicas_are_refused_by_name(replica: ReplicaId) -> None:
    pool = StagePool("talker", [A, B])
    for ask in (pool.in_flight, pool.release, pool.remove, pool.drain, pool.avoid):
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
    assert [pool.admit() for _ in range(3)] == [B] * 3
    assert {pool.admit(), pool.admit()} == {A, B}
    pool.publish({})
    assert pool.admit() == A, "an old report still counts"


def test_a_repeated_report_does_not_hide_requests_sent_since() -> None:
    pool = StagePool("talker", [A, B])
    first = {A: Load(running=10, report=1), B: Load(running=13, report=1)}
    pool.publish(first)
    for _ in range(3):
        assert pool.admit() == A
        pool.publish(first)
    assert {pool.admit(), pool.admit()} == {A, B}
    pool.publish({A: Load(running=10, report=2), B: Load(running=13, report=1)})
    assert pool.admit() == A


def test_reports_of_unknown_replicas_are_refused_and_change_nothing() -> None:
    pool = StagePool("talker", [A, B])
    with pytest.raises(UnknownMember):
        pool.publish({A: Load(running=9), C: Load()})
    assert {pool.admit() for _ in range(2)} == {A, B}


def test_an_avoided_replica_is_used_when_there_is_no_other() -> None:
    pool = StagePool("talker", [A, B])
    pool.avoid(A)
    assert {pool.admit() for _ in range(4)} == {B}
    pool.drain(B)
    assert pool.admit() == A
    pool.drain(A)
    with pytest.raises(StageUnavailable, match="'talker' is draining: all its replicas are"):
        pool.admit()


def test_a_sleeping_replica_is_used_when_no_other_is_awake() -> None:
    zero, one, two = A, B, C
    pool = StagePool("talker", [A, B, C])
    pool.mark_asleep(zero)
    pool.avoid(one)
    assert {pool.admit() for _ in range(4)} == {two}
    pool.mark_asleep(two)
    assert pool.admit() == one, "an avoided one works, a sleeping one does not"
    pool.drain(one)
    assert {pool.admit() for _ in range(8)} == {zero, two}, "they wait"
    pool.add(zero)
    pool.mark_awake(two)
    assert {pool.admit() for _ in range(8)} == {two}, "opening does not wake"
    pool.remove(zero)
    pool.add(zero)
    pool.mark_asleep(two)
    assert pool.admit() == zero, "who comes back is awake"
    with pytest.raises(UnknownMember):
        pool.mark_asleep(ReplicaId("talker", 7))


def test_requests_of_a_session_or_with_a_media_item_go_to_one_replica() -> None:
    pool = StagePool("talker", [A, B, C])
    where = pool.admit(session="s", media=["cat"])
    assert [pool.admit(session="s") for _ in range(3)] == [where] * 3
    assert [pool.admit(media=["dog", "cat"]) for _ in range(3)] == [where] * 3
    assert pool.admit(session="cat") != where
    pool.drain(where)
    moved = pool.admit(session="s")
    assert moved != where
    pool.add(where)
    assert pool.admit(session="s") == moved


def test_affinity_does_not_overload_a_replica() -> None:
    pool = StagePool("talker", [A, B])
    for _ in range(200):
        pool.admit(media=["the same picture"])
    assert abs(pool.in_flight(A) - pool.in_flight(B)) <= SLACK + 1


def test_affinity_is_bounded_and_ends_with_the_replica() -> None:
    affinity = Affinity(limit=10)
    pool = StagePool("talker", [A, B], affinity=affinity)
    for i in range(100):
        pool.admit(session=str(i), media=["x" * 1000, str(i)])
    assert len(affinity) == 10
    pool.remove(A)
    pool.remove(B)
    assert len(affinity) == 0


class PoolMachine(RuleBasedStateMachine):
    """Any order of calls, compared with a plain dictionary."""

    @initialize(count=st.integers(1, 3))
    def start(self, count: int) -> None:
        self.pool = StagePool("talker", [ReplicaId("talker", i) for i in range(count)])
        self.requests = {ReplicaId("talker", i): 0 for i in range(count)}
        self.draining: set[ReplicaId] = set()

    @rule(index=st.integers(0, 3))
    def add(self, index: int) -> None:
        self.pool.add(ReplicaId("talker", index))
        self.requests.setdefault(ReplicaId("talker", index), 0)
        self.draining.discard(ReplicaId("talker", index))

    @rule(data=st.data())
    def drain(self, data: st.DataObject) -> None:
        if self.requests:
            replica = data.draw(st.sampled_from(sorted(self.requests)))
            self.pool.drain(replica)
            self.draining.add(replica)

    @rule()
    def admit(self) -> None:
        if self.draining == self.requests.keys():
            with pytest.raises(StageUnavailable, match="draining" if self.requests else "no live replica"):
                self.pool.admit()
            return
        least = min(load for replica, load in self.requests.items() if replica not in self.draining)
        got = self.pool.admit()
        assert self.requests[got] == least and got not in self.draining
        self.requests[got] += 1

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if busy := sorted(replica for replica, count in self.requests.items() if count):
            replica = data.draw(st.sampled_from(busy))
            self.pool.release(replica)
            self.requests[replica] -= 1

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        if self.requests:
            replica = data.draw(st.sampled_from(sorted(self.requests)))
            self.pool.remove(replica)
            self.draining.discard(replica)
            del self.requests[replica]

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "pool"):
            assert {replica: self.pool.in_flight(replica) for replica in self.pool.replicas} == self.requests


PoolMachine.TestCase.settings = settings(max_examples=examples(25), stateful_step_count=20, deadline=None)
TestPoolMachine = PoolMachine.TestCase


def test_the_reason_of_a_decision_is_reported() -> None:
    told: list[tuple[ReplicaId, str]] = []
    pool = StagePool("talker", [A], decided=lambda *each: told.append(each))
    pool.admit(session="s")
    pool.add(B)
    pool.admit()
    pool.admit(session="s")
    assert told == [(A, "only"), (B, "policy"), (A, "affinity")]
