"""What a subscriber makes of the views it gets: views in, what to do out. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TypeAlias

from vllm_omni_ext.coordinator.members import ATTACHED, Attach, Detach, Entry, Forget, Member, State, View
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.pool.load import Load
from vllm_omni_ext.pool.stage_pool import StagePool

Change: TypeAlias = Attach | Detach | Forget


class Follower:
    """The replicas as far as this subscriber knows. Views may be missed: only the difference to the last one counts.

    A coordinator that was started again knows only of those who have registered with it so far. Until it is settled,
    replicas that were there before it are kept as they were, without a load.
    """

    def __init__(self) -> None:
        self.view: View | None = None
        self._kept: dict[ReplicaId, Entry] = {}

    def take(self, view: View) -> list[Change]:
        """Take the next view and say what has changed: first who is gone, then who is there."""
        before = self.view
        if before is not None and before.generation != view.generation:
            self._kept = {entry.member.id: entry for entry in _unloaded(before.replicas)}
        for entry in view.replicas:
            self._kept.pop(entry.member.id, None)
        if view.settled:
            self._kept.clear()
        everybody = (*view.replicas, *self._kept.values())
        self.view = replace(view, replicas=tuple(sorted(everybody, key=lambda entry: entry.member)))
        return _changes(before.replicas if before else (), self.view.replicas)

    def distrust(self) -> View | None:
        """The last view is too old: keep who is there, forget how busy they are."""
        if self.view is not None:
            self.view = replace(self.view, replicas=_unloaded(self.view.replicas))
        return self.view


def loads(view: View, stage: str) -> dict[ReplicaId, Load]:
    """What is known of the loads of a stage's attached replicas; for `StagePool.publish`."""
    return {
        entry.member.id: entry.load
        for entry in view.replicas
        if entry.member.id.stage == stage and entry.state in ATTACHED and entry.load is not None
    }


def _unloaded(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    return tuple(replace(entry, load=None) for entry in entries)


def _changes(before: Iterable[Entry], after: Iterable[Entry]) -> list[Change]:
    was, now = {e.member: e.state for e in before}, {e.member: e.state for e in after}
    attached_before, attached = _attached(was), _attached(now)
    found: list[Change] = [
        Detach(m, f"it is {now[m].value}" if m in now else "it has left") for m in attached_before if m not in attached
    ]
    found.extend(Forget(m) for m in was if m not in now)
    found.extend(Attach(m) for m in attached if m not in attached_before)
    return found


def _attached(states: dict[Member, State]) -> list[Member]:
    return [member for member, state in states.items() if state in ATTACHED]


def steer(pool: StagePool, view: View) -> None:
    """Open, avoid or drain the replicas of a pool, and take their loads, as the view says.

    Replicas that are not in the pool (yet) are not touched: `Attach` and `Detach` say when they come and go.
    """
    states = {entry.member.id: entry.state for entry in view.replicas}
    for replica in pool.replicas:
        match states.get(replica):
            case State.UP:
                pool.add(replica)
            case State.SUSPECT:
                pool.avoid(replica)
            case State.DRAINING | State.DOWN:
                pool.drain(replica)
    known = loads(view, pool.stage)
    pool.publish({replica: known[replica] for replica in pool.replicas if replica in known})
