"""Changes that a subscriber computes from views."""

from __future__ import annotations

import pytest

from vllm_omni_ext.coordinator.members import Attach, Detach, Entry, Forget, Member, State, View, ViewDiff, apply_view
from vllm_omni_ext.pool.load import Load
from vllm_omni_ext.pool.stage_pool import StagePool

A, B, C = (Member("talker", i, 7) for i in range(3))
A2 = Member(A.stage, A.index, 8)
BUSY = Load(3, 4, 0.5)


def view(*entries: Entry, generation: int = 1, settled: bool = True) -> View:
    return View(generation=generation, settled=settled, timeout_s=1.0, replicas=entries)


def up(member: Member, load: Load | None = BUSY) -> Entry:
    return Entry(member, State.UP, load)


def test_changes_are_the_difference_of_two_views() -> None:
    follower = ViewDiff()
    assert follower.take(view(up(A), Entry(B, State.DOWN))) == [Attach(A), Attach(B), Detach(B, "it is down")]
    assert follower.take(view(Entry(A, State.SUSPECT), up(B))) == [Attach(B)]
    assert follower.take(view(Entry(A, State.DOWN), Entry(B, State.DRAINING))) == [Detach(A, "it is down")]
    assert follower.take(view(up(A))) == [Detach(B, "it has left"), Forget(B), Attach(A)]
    assert follower.take(view(up(A))) == []


@pytest.mark.parametrize(("generation", "settled"), [(1, True), (2, False)])
def test_the_next_replica_of_a_name_replaces_the_one_before(generation: int, settled: bool) -> None:
    follower = ViewDiff()
    follower.take(view(up(A)))
    changes = follower.take(view(up(A2), generation=generation, settled=settled))
    assert changes == [Detach(A, "it has left"), Forget(A), Attach(A2)]


def test_a_new_coordinator_removes_no_replica_until_it_has_settled() -> None:
    follower = ViewDiff()
    follower.take(view(up(A), up(B), up(C)))
    assert follower.take(view(generation=2, settled=False)) == []
    assert follower.view is not None and {entry.load for entry in follower.view.replicas} == {None}
    assert follower.take(view(up(A), generation=2, settled=False)) == []
    assert follower.take(view(up(A), up(B), generation=2, settled=False)) == []
    assert [entry.load for entry in follower.view.replicas] == [BUSY, BUSY, None]
    assert follower.take(view(up(A), generation=2, settled=False)) == [Detach(B, "it has left"), Forget(B)]
    assert follower.take(view(up(A), generation=2)) == [Detach(C, "it has left"), Forget(C)]


def test_an_earlier_process_of_a_name_does_not_replace_the_next_one_at_a_new_coordinator() -> None:
    follower = ViewDiff()
    follower.take(view(up(A2)))
    assert follower.take(view(up(A), generation=2, settled=False)) == []
    assert follower.view is not None and [entry.member for entry in follower.view.replicas] == [A2]
    assert follower.take(view(up(A2), generation=2, settled=False)) == []
    assert follower.take(view(up(A), generation=3)) == [Detach(A2, "it has left"), Forget(A2), Attach(A)]


def test_an_outdated_view_keeps_the_replicas_without_loads() -> None:
    follower = ViewDiff()
    assert follower.without_loads() is None
    follower.take(view(up(A)))
    old = follower.without_loads()
    assert old is not None and old.replicas == (up(A, None),)
    assert follower.take(view(up(A))) == []


def test_a_pool_follows_states_and_loads_of_a_view() -> None:
    pool = StagePool("talker", [A.id, B.id])
    apply_view(pool, view(Entry(A, State.SUSPECT), up(B), up(C)))
    assert {pool.admit() for i in range(4)} == {B.id}
    apply_view(pool, view(up(A, Load()), Entry(B, State.DRAINING, Load()), up(Member("thinker", 0, 1))))
    assert {pool.admit() for i in range(4, 8)} == {A.id}
    apply_view(pool, view(Entry(A, State.DOWN), up(B)))
    assert pool.admit() == B.id
