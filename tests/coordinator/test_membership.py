"""The state machine of replicas, one rule at a time; `test_membership_properties` explores their combinations."""

from __future__ import annotations

import dataclasses

import pytest

from vllm_omni_ext.coordinator import membership as module
from vllm_omni_ext.coordinator.members import (
    LEFT,
    Attach,
    Change,
    Detach,
    Forget,
    Heartbeat,
    Leave,
    Member,
    State,
    View,
    ViewDiff,
)
from vllm_omni_ext.coordinator.membership import KEPT_TIMEOUTS, PUBLISH_GAP_S, Membership, Names, Timing
from vllm_omni_ext.pool.load import Load

TIMING = Timing(timeout_s=10.0, drain_s=30.0)
KEY = "the head's"
BUSY, IDLE = Load(1, 2, 0.5), Load()
FIRST, SECOND = Member("talker", 0, 1), Member("talker", 1, 2)
AGAIN = Member("talker", 0, 3)
"""The next process with the name of the first."""


class Desk:
    """A membership with a clock that stands still, and helpers that tick as a server would and return the changes."""

    def __init__(self, generation: int = 100, *, settled: bool = True) -> None:
        self.now = 0.0
        self.them = Membership(KEY, TIMING, generation=generation, at=0.0)
        self.views: list[View] = []
        self._diff = ViewDiff()
        self.wait(TIMING.timeout_s if settled else 0.0)

    def changes(self) -> list[Change]:
        return self._diff.take(self.them.view(self.now))

    def tick(self) -> list[Change]:
        if (view := self.them.tick(self.now)) is not None:
            self.views.append(view)
        return self.changes()

    def wait(self, seconds: float) -> list[Change]:
        end, found = self.now + seconds, []
        while (due := self.them.deadline()) <= end:
            self.now = max(self.now, due)
            found.extend(self.tick())
        self.now = end
        return found + self.tick()

    def beat(self, member: Member, load: Load = IDLE, proof: str | None = None) -> list[Change]:
        self.them.receive(Heartbeat(member, load, member.proof(KEY) if proof is None else proof), self.now)
        return self.changes()

    def leave(self, member: Member, *, drain: bool = True, proof: str | None = None) -> list[Change]:
        self.them.receive(Leave(member, drain, member.proof(KEY) if proof is None else proof), self.now)
        return self.changes()

    def states(self) -> dict[str, State]:
        return {str(entry.member.id): entry.state for entry in self.them.view(self.now).replicas}


def test_a_replica_is_up_with_its_first_heartbeat_then_suspect_down_and_forgotten() -> None:
    desk = Desk()
    assert desk.beat(FIRST) == [Attach(FIRST)] and desk.beat(FIRST) == []
    assert desk.wait(TIMING.suspect_s - 0.01) == [] and desk.states() == {"talker/0": State.UP}
    assert desk.wait(0.01) == [] and desk.states() == {"talker/0": State.SUSPECT}
    assert desk.beat(FIRST) == [] and desk.states() == {"talker/0": State.UP}
    assert desk.wait(10) == [Detach(FIRST, "it is down")]
    assert desk.states() == {"talker/0": State.DOWN}
    assert desk.beat(FIRST) == [Attach(FIRST)]
    desk.wait(10)
    assert desk.wait(KEPT_TIMEOUTS * 10) == [Forget(FIRST)]
    assert desk.states() == {}
    assert desk.beat(FIRST) == [Attach(FIRST)], "it was silent, and has not left"


def test_the_next_process_of_a_name_replaces_the_one_before() -> None:
    desk = Desk()
    desk.beat(FIRST)
    desk.beat(SECOND)
    assert desk.beat(AGAIN) == [Detach(FIRST, LEFT), Forget(FIRST), Attach(AGAIN)]
    for late in (desk.beat(FIRST, BUSY), desk.leave(FIRST), desk.leave(FIRST, drain=False)):
        assert late == []
    assert [entry.member for entry in desk.them.view(desk.now).replicas] == [AGAIN, SECOND]
    assert set(desk.states().values()) == {State.UP}


def test_a_replica_that_has_left_does_not_return() -> None:
    desk = Desk()
    desk.beat(FIRST)
    assert desk.leave(FIRST, drain=False) == [Detach(FIRST, LEFT), Forget(FIRST)]
    assert desk.beat(FIRST) == [] and desk.states() == {}
    assert desk.leave(AGAIN, drain=False) == [], "its process ended before its first heartbeat"
    assert desk.beat(AGAIN) == []
    later = Member("talker", 0, 4)
    assert desk.beat(later) == [Attach(later)]


def test_the_end_of_the_next_process_removes_the_one_before() -> None:
    desk = Desk()
    desk.beat(FIRST)
    assert desk.leave(AGAIN, drain=True) == [], "nothing is known about it"
    assert desk.states() == {"talker/0": State.UP}
    assert desk.leave(AGAIN, drain=False) == [Detach(FIRST, LEFT), Forget(FIRST)]


def test_a_new_coordinator_finds_all_replicas_by_their_heartbeats() -> None:
    before, members = Desk(), (FIRST, SECOND)
    for member in members:
        before.beat(member)
    after = Desk(generation=200, settled=False)
    for member in members:
        assert after.beat(member) == [Attach(member)]
    assert after.them.view(0.0).replicas == before.them.view(0.0).replicas
    assert not after.them.view(after.now).settled
    after.wait(TIMING.timeout_s)
    assert after.them.view(after.now).settled


def test_draining_ends_with_the_last_request_but_not_at_once() -> None:
    desk = Desk()
    desk.beat(FIRST)
    assert desk.leave(FIRST) == [] and desk.states() == {"talker/0": State.DRAINING}
    assert desk.beat(FIRST, IDLE) == []  # a request may be on its way to it
    desk.wait(TIMING.interval_s)
    assert desk.beat(FIRST, BUSY) == []
    assert desk.leave(FIRST) == []
    assert desk.beat(FIRST, IDLE) == [Detach(FIRST, LEFT), Forget(FIRST)]
    assert desk.leave(FIRST) == [] == desk.beat(FIRST), "its process ends a moment later"


def test_draining_ends_at_its_deadline_or_with_silence() -> None:
    desk = Desk()
    desk.beat(FIRST)
    desk.beat(SECOND)
    desk.leave(FIRST)
    desk.leave(SECOND)
    found = []
    for _ in range(29):
        found += desk.wait(1)
        desk.beat(FIRST, BUSY)
    assert found == [Detach(SECOND, LEFT), Forget(SECOND)]
    assert desk.wait(1) == [Detach(FIRST, LEFT), Forget(FIRST)]
    assert desk.beat(FIRST) == []
    desk.beat(AGAIN)
    desk.wait(11)
    assert desk.leave(AGAIN) == [Forget(AGAIN)], "its requests are lost already"


def test_changes_are_published_together_and_views_come_at_least_every_interval() -> None:
    desk = Desk()
    desk.wait(1)
    desk.views.clear()
    members = [Member("talker", i, i) for i in range(50)]
    for load in (IDLE, BUSY):
        for member in members:
            desk.beat(member, load)
    desk.wait(PUBLISH_GAP_S)
    assert [len(view.replicas) for view in desk.views] == [50]
    assert {entry.load for entry in desk.views[0].replicas} == {dataclasses.replace(BUSY, report=2)}
    desk.views.clear()
    desk.wait(2 * TIMING.interval_s)
    assert len(desk.views) == 2


def test_an_equal_report_is_numbered_and_waits_for_the_next_view() -> None:
    desk = Desk()
    desk.beat(FIRST)
    desk.wait(PUBLISH_GAP_S)
    desk.views.clear()
    desk.beat(FIRST)
    desk.wait(2 * PUBLISH_GAP_S)
    assert desk.views == []
    desk.wait(TIMING.interval_s)
    assert [view.replicas[0].load for view in desk.views] == [Load(report=2)]
    desk.views.clear()
    desk.wait(5)
    assert desk.them.view(desk.now).replicas[0].load is None, "it is outdated"


def test_a_delay_of_the_coordinator_is_not_counted_as_silence() -> None:
    desk = Desk()
    desk.beat(FIRST)
    desk.wait(1)
    desk.now += 1000.0
    assert desk.tick() == [] and desk.states() == {"talker/0": State.UP}
    assert Detach(FIRST, "it is down") in desk.wait(10)


@pytest.mark.parametrize("timeout", [1.0, 3.0, 30.0, 300.0])
def test_several_heartbeats_fit_into_every_timeout(timeout: float) -> None:
    timing = Timing(timeout_s=timeout, drain_s=0)
    assert 4 * timing.interval_s < timing.timeout_s
    assert 2 * timing.interval_s < timing.suspect_s < timing.timeout_s < timing.forget_s


@pytest.mark.parametrize(
    "proof", ["", "talker/0#1", "ä", "a" * 500, FIRST.proof("another head's"), SECOND.proof(KEY), AGAIN.proof(KEY)]
)
def test_messages_without_the_proof_of_their_replica_have_no_effect(proof: str) -> None:
    desk = Desk()
    assert desk.beat(FIRST, proof=proof) == [] and desk.states() == {}
    desk.beat(FIRST, BUSY)
    before = desk.them.view(desk.now)
    for drain in (True, False):
        assert desk.leave(FIRST, proof=proof, drain=drain) == []
    assert desk.beat(FIRST, IDLE, proof) == []
    assert desk.them.view(desk.now) == before and FIRST.proof(KEY) not in repr(before)
    for _ in range(30):
        desk.wait(TIMING.timeout_s / 10)
        desk.beat(FIRST, IDLE, proof)
    assert desk.states() == {"talker/0": State.DOWN}, "no replica lives on such heartbeats"


def test_a_replica_gets_its_former_name_or_the_lowest_free_one_and_epochs_are_new(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_REPLICAS", 5)
    names = Names(KEY, [FIRST.id])
    assert names.give(FIRST.id) == FIRST

    def given(before: int | None, stage: str = "talker") -> tuple[int, int] | None:
        member = names.give_free(stage, before)
        assert member is None or names.get(member.id) == member
        return None if member is None else (member.index, member.epoch)

    assert [given(None), given(4), given(4), given(0), given(99)] == [(1, 2), (4, 3), (2, 4), (3, 5), None]
    assert given(0, "thinker") == (0, 6)
    names.free(SECOND)
    assert names.get(SECOND.id) is None and given(None) == (1, 7)
    names.free(SECOND)
    assert names.get(SECOND.id) == Member("talker", 1, 7), "a late message does not free the name"
    names.free(FIRST)
    assert given(0) is None, "it is planned"
    assert names.give(FIRST.id).epoch == 8
    assert names.proof(SECOND) == SECOND.proof(KEY)
