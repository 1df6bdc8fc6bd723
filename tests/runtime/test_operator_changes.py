"""Changes of operators in the head: made once, and settled when every API server has made them."""

from __future__ import annotations

from vllm_omni_ext.runtime.supervise.operator_changes import OperatorChanges
from vllm_omni_ext.wire.operator_state import ReplicasSlept

SLEPT = ReplicasSlept(("talker/0",), asleep=True)


def test_a_change_is_settled_when_all_have_made_it() -> None:
    changes = OperatorChanges()
    version = changes.asked(1, 7, SLEPT, (0, 1, 2))
    assert changes.state.asleep == {"talker/0"}
    assert changes.made(2, version) == changes.made(0, version) == changes.made(0, version) == []
    assert changes.made(1, version) == [(1, 7)]
    assert changes.made(1, version) == []


def test_overlapping_changes_are_settled_apart() -> None:
    changes = OperatorChanges()
    first, second = changes.asked(0, 7, SLEPT, (0, 1)), changes.asked(1, 7, SLEPT, (0, 1))
    assert first != second
    assert [changes.made(1, version) for version in (first, second)] == [[], []]
    assert changes.made(0, second) == [(1, 7)]
    assert changes.made(0, first) == [(0, 7)]


def test_a_dead_api_server_is_not_waited_for() -> None:
    changes = OperatorChanges()
    version = changes.asked(1, 7, SLEPT, (0, 1))
    assert changes.made(1, version) == []
    assert changes.server_lost(0) == [(1, 7)]
    version = changes.asked(0, 7, SLEPT, (0, 1))
    assert changes.server_lost(0) == [] == changes.made(1, version)
    assert changes.state.asleep == {"talker/0"}, "the change stays"
    changes.replica_ended("talker/0")
    assert changes.state.asleep == frozenset(), "its next process is awake"
