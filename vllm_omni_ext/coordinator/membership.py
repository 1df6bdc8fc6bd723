"""State machine of the replicas of a deployment: receives messages, returns views. No I/O, no threads, no clock.

    first heartbeat --> UP --3 beats missed--> SUSPECT --timeout--> DOWN --11 timeouts--> removed
                        ^ <----heartbeat-----' |                      |
                        '<-----heartbeat (attached again)-------------'
    any state --leave--> DRAINING --no requests, no heartbeats, or drain time over--> removed

A replica is *attached* while it is UP, SUSPECT or DRAINING: its requests continue. The head (the process that starts a
deployment; class `Names`) assigns every process of a replica its name (`talker/1`), an epoch, and a proof of both. The
coordinator (`Membership`) ignores messages without the proof. A heartbeat registers its replica; there is no other
registration. So a restarted coordinator finds all replicas by their heartbeats, and messages of another deployment have
no effect. Of two processes with one name, the coordinator keeps the one with the larger epoch. A replica that has left
does not return. A replica that missed heartbeats may return.

Times are seconds of one monotonic clock, passed in by the caller. Only `tick` applies deadlines: a delayed caller first
passes in the messages that have arrived, then calls `tick`. A late tick (see `deadline`) extends all deadlines, so that
a delay of the coordinator is not counted as missing heartbeats.
"""

from __future__ import annotations

import hmac
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from vllm_omni_ext.coordinator.members import Entry, Heartbeat, Leave, Member, State, ToCoordinator, View
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.pool.load import Load

BEATS_PER_TIMEOUT = 5
"""Number of heartbeats that a replica sends within the heartbeat timeout: four of five may be lost or late."""

LONGEST_INTERVAL_S = 1.0
"""Longest time between two heartbeats, also for a long timeout, because heartbeats carry the load."""

MISSED_BEATS = 3
"""A replica that missed this many heartbeats is SUSPECT."""

KEPT_TIMEOUTS = 10
"""A replica that is DOWN is removed after this many further timeouts, or when another process gets its name."""

PUBLISH_GAP_S = 0.1
"""Shortest time between two published views, in seconds; that of vLLM's data parallel coordinator."""

MAX_REPLICAS = 4096
"""Most replicas of one stage."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """The heartbeat timeout, and the time limits that are computed from it. All in seconds.

    Attributes:
        timeout_s: a replica without heartbeats for this time is DOWN.
        drain_s: time that a leaving replica has to finish its requests.
    """

    timeout_s: float
    drain_s: float

    @property
    def interval_s(self) -> float:
        """Seconds between two heartbeats, and the longest time between two views that the API servers receive.

        A view is the state and the load of all replicas.
        """
        return min(self.timeout_s / BEATS_PER_TIMEOUT, LONGEST_INTERVAL_S)

    @property
    def suspect_s(self) -> float:
        """Time without heartbeats after which a replica is SUSPECT; shorter than the timeout."""
        return MISSED_BEATS * self.interval_s

    @property
    def forget_s(self) -> float:
        """Time without heartbeats after which a replica is removed."""
        return (1 + KEPT_TIMEOUTS) * self.timeout_s


class Names:
    """Assigns names to the processes of replicas, each time with a new epoch. Used by the head process.

    Args:
        key: the head's key for `Member.proof`.
        planned: names of the replicas that the head starts itself. `give_free` does not assign them.
    """

    def __init__(self, key: str, planned: Iterable[ReplicaId]) -> None:
        self._key = key
        self._planned = frozenset(planned)
        self._epochs = itertools.count(1)
        self._members: dict[ReplicaId, Member] = {}

    def give(self, replica: ReplicaId) -> Member:
        """Assign a name to a process that is going to start; return the name with a new epoch.

        The process replaces an earlier process of that name.
        """
        member = self._members[replica] = Member(replica.stage, replica.index, next(self._epochs))
        return member

    def give_free(self, stage: str, before: int | None) -> Member | None:
        """Assign a free name of a stage to a replica that joins from another process; None if no name is free.

        Args:
            before: index that the replica had before; it is assigned if it is free. Otherwise: the lowest free index.
        """
        taken = self._members.keys() | self._planned
        indices = (*(() if before is None else (before,)), *range(MAX_REPLICAS))
        free = (name for index in indices if index < MAX_REPLICAS and (name := ReplicaId(stage, index)) not in taken)
        found = next(free, None)
        return None if found is None else self.give(found)

    def get(self, replica: ReplicaId) -> Member | None:
        """Return name and epoch of the process to which a name is assigned; None if the name is free."""
        return self._members.get(replica)

    def free(self, member: Member) -> None:
        """Free the name of a process, unless the name is assigned to a later process."""
        if self._members.get(member.id) == member:
            del self._members[member.id]

    def proof(self, member: Member) -> str:
        """Return the proof that this head has assigned a name and epoch (see `Member.proof`)."""
        return member.proof(self._key)


@dataclass(slots=True)
class _Record:
    member: Member
    last_seen: float
    """Time of the last message's arrival. If the coordinator was delayed, `_extend_deadlines` moves it forward."""
    state: State = State.UP
    leaving: float = math.inf
    """Time at which the replica began to leave; infinite if it is not leaving."""
    load: Load | None = None
    reports: int = 0


class Membership:
    """The states of all replicas in the coordinator. Messages (`receive`) and time (`tick`) change them.

    Args:
        key: the head's key for proofs (see `Member.proof`).
        generation: `View.generation`, a number larger than that of any earlier coordinator.
        at: the current time.
    """

    def __init__(self, key: str, timing: Timing, *, generation: int, at: float) -> None:
        self._key = key
        self._timing = timing
        self._generation = generation
        self._settles = at + timing.timeout_s
        """Time until which replicas of an earlier coordinator may send their first heartbeat (see `View.settled`)."""
        self._records: dict[ReplicaId, _Record] = {}
        self._left: dict[ReplicaId, int] = {}
        """Largest epoch that has left, by the replica's name. Heartbeats of this epoch or a smaller one are ignored."""
        self._changed = True
        self._published = -math.inf
        self._expiry = math.inf
        """Time before which no replica changes its state because of missing heartbeats; `tick` need not look
        earlier."""

    def receive(self, message: ToCoordinator, at: float) -> None:
        """Apply one message that arrived at the time `at`. A message with a wrong proof or an old epoch is ignored."""
        member = message.member
        if not hmac.compare_digest(message.proof.encode(), member.proof(self._key).encode()):
            return
        record = self._records.get(member.id)
        if record is None or record.member.epoch <= member.epoch:  # otherwise a late message of an earlier process
            match message:
                case Heartbeat():
                    self._heartbeat(message, record, at)
                case Leave():
                    self._leave(message, record, at)

    def tick(self, at: float) -> View | None:
        """Apply all deadlines until the time `at`: change the states of replicas, and remove replicas.

        Returns:
            The view to publish; None if no view is due.
        """
        late = at - self.deadline()
        if late > self._timing.interval_s:
            self._extend_deadlines(at, late)
        if at >= self._expiry:
            self._expiry = math.inf
            for record in tuple(self._records.values()):
                self._expire(record, at)
        if at < self._published + (PUBLISH_GAP_S if self._changed else self._timing.interval_s):
            return None
        self._published, self._changed = at, False
        return self.view(at)

    def deadline(self) -> float:
        """Return the time at which `tick` must be called next, if no message arrives before."""
        wait = PUBLISH_GAP_S if self._changed else self._timing.interval_s
        return min(self._expiry, self._published + wait)

    def view(self, at: float) -> View:
        """Return a view with the current states of all replicas."""
        records = sorted(self._records.values(), key=lambda record: record.member)
        return View(
            generation=self._generation,
            settled=at >= self._settles,
            timeout_s=self._timing.timeout_s,
            replicas=tuple(Entry(record.member, record.state, _recent(record)) for record in records),
        )

    def _heartbeat(self, message: Heartbeat, record: _Record | None, at: float) -> None:
        member = message.member
        if record is None or record.member != member:
            if member.epoch <= self._left.get(member.id, -1):
                return
            record = self._records[member.id] = _Record(member, at)
        record.last_seen = max(record.last_seen, at)
        before, record.reports = record.load, record.reports + 1
        record.load = replace(message.load, report=record.reports)
        self._changed |= before is None or replace(before, report=record.reports) != record.load
        if record.state is not State.DRAINING:
            self._enter(record, State.UP)
        elif message.load.queue == 0 and at >= record.leaving + self._timing.interval_s:
            # Not earlier: API servers that have not received the state DRAINING may have sent it requests.
            self._forget(record)

    def _leave(self, message: Leave, record: _Record | None, at: float) -> None:
        if not message.drain or (record is not None and record.state is State.DOWN):
            self._left[message.member.id] = max(message.member.epoch, self._left.get(message.member.id, -1))
            if record is not None:
                self._forget(record)
        elif record is not None and record.member == message.member and record.state is not State.DRAINING:
            record.last_seen = max(record.last_seen, at)
            record.leaving = at
            self._enter(record, State.DRAINING)

    def _extend_deadlines(self, at: float, late: float) -> None:
        """Extend the heartbeat deadlines of all replicas by `late` seconds and one heartbeat interval, at time `at`.

        Called when the coordinator's process was delayed by `late` seconds and has not received heartbeats meanwhile.
        """
        for record in self._records.values():
            record.last_seen = min(at, record.last_seen + late + self._timing.interval_s)

    def _expire(self, record: _Record, at: float) -> None:
        while at >= self._state_deadline(record):
            match record.state:
                case State.UP:
                    self._enter(record, State.SUSPECT)
                case State.SUSPECT:
                    self._enter(record, State.DOWN)
                case _:
                    self._forget(record)
                    return
        self._expiry = min(self._expiry, self._state_deadline(record))

    def _state_deadline(self, record: _Record) -> float:
        """Return the time at which a replica that sends no further message leaves its state."""
        timing = self._timing
        match record.state:
            case State.UP:
                return record.last_seen + timing.suspect_s
            case State.SUSPECT:
                return record.last_seen + timing.timeout_s
            case State.DOWN:
                return record.last_seen + timing.forget_s
            case State.DRAINING:
                return min(record.last_seen + timing.timeout_s, record.leaving + timing.drain_s)

    def _enter(self, record: _Record, state: State) -> None:
        self._changed |= record.state is not state
        record.state = state
        self._expiry = min(self._expiry, self._state_deadline(record))

    def _forget(self, record: _Record) -> None:
        member = record.member
        del self._records[member.id]
        self._changed = True
        if record.state is State.DRAINING:
            self._left[member.id] = max(member.epoch, self._left.get(member.id, -1))


def _recent(record: _Record) -> Load | None:
    """Return the load for the view; None if the replica misses heartbeats, because the load is then outdated."""
    return record.load if record.state in (State.UP, State.DRAINING) else None
