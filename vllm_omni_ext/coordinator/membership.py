"""State machine of the replicas of a deployment: messages in, views out. No I/O, no threads, no clock.

    first heartbeat --> UP --3 beats missed--> SUSPECT --timeout--> DOWN --long gone--> forgotten
                        ^ <----heartbeat-----' |                      |
                        '<-----heartbeat (attached again)-------------'
    any state --leave--> DRAINING --empty, silent or too slow--> forgotten

A replica is *attached* while it is UP, SUSPECT or DRAINING: its requests continue. The head gives every process of a
replica its name (`talker/1`), an epoch, and a proof of both (`Names`). In the coordinator (`Membership`) a message
counts only with the proof, and a heartbeat is the only registration. So a coordinator that is started again finds all
replicas by their heartbeats, and messages of another deployment have no effect. Of two replicas of one name the one
with the larger epoch counts. A replica that has left does not return; one that was silent may.

Times are seconds of one monotonic clock, passed in by the caller. Only `tick` lets time pass: a delayed caller first
passes in the messages that have arrived, then ticks. A late tick (see `deadline`) extends all deadlines, so that a
delay of the coordinator is not counted as silence of the replicas.
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
"""Heartbeats in one timeout: four may be lost or late."""

LONGEST_INTERVAL_S = 1.0
"""Heartbeats carry the load, so they are sent at least this often however long the timeout is."""

MISSED_BEATS = 3
"""A replica that missed this many heartbeats is avoided."""

KEPT_TIMEOUTS = 10
"""A silent replica keeps its name for this many timeouts, unless another needs it."""

PUBLISH_GAP_S = 0.1
"""Least time between two publications (vLLM's own coordinator publishes at this pace)."""

MAX_REPLICAS = 4096
"""Most replicas of one stage."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Everything that is derived from the heartbeat timeout. All in seconds.

    Attributes:
        timeout_s: a replica that is silent for this time is down.
        drain_s: time that a leaving replica has to finish its requests.
    """

    timeout_s: float
    drain_s: float

    @property
    def interval_s(self) -> float:
        """Time between two heartbeats, and the longest time between two publications."""
        return min(self.timeout_s / BEATS_PER_TIMEOUT, LONGEST_INTERVAL_S)

    @property
    def suspect_s(self) -> float:
        """Silence after which a replica is avoided; shorter than the timeout."""
        return MISSED_BEATS * self.interval_s

    @property
    def forget_s(self) -> float:
        """Silence after which a replica's name is free."""
        return (1 + KEPT_TIMEOUTS) * self.timeout_s


class Names:
    """The names of all replicas, in the head. Every process of a replica gets a name with a new epoch.

    Args:
        key: the head's key for proofs.
        planned: names of the replicas that the head starts itself, which no other replica gets.
    """

    def __init__(self, key: str, planned: Iterable[ReplicaId]) -> None:
        self._key = key
        self._planned = frozenset(planned)
        self._epochs = itertools.count(1)
        self._members: dict[ReplicaId, Member] = {}

    def give(self, replica: ReplicaId) -> Member:
        """Give a name to a process that is going to start. An earlier process of that name does not count any more."""
        member = self._members[replica] = Member(replica.stage, replica.index, next(self._epochs))
        return member

    def give_free(self, stage: str, before: int | None) -> Member | None:
        """Give the name with the index `before` if it is free, else the lowest free one; None if there is none."""
        taken = self._members.keys() | self._planned
        indices = (*(() if before is None else (before,)), *range(MAX_REPLICAS))
        free = (name for index in indices if index < MAX_REPLICAS and (name := ReplicaId(stage, index)) not in taken)
        found = next(free, None)
        return None if found is None else self.give(found)

    def get(self, replica: ReplicaId) -> Member | None:
        """The process that has a name; None if the name is free."""
        return self._members.get(replica)

    def free(self, member: Member) -> None:
        """Free a name, unless a later process has it."""
        if self._members.get(member.id) == member:
            del self._members[member.id]

    def proof(self, member: Member) -> str:
        """The proof that this head has given a name."""
        return member.proof(self._key)


@dataclass(slots=True)
class _Record:
    member: Member
    last_seen: float
    """Last sign of life."""
    state: State = State.UP
    leaving: float = math.inf
    """When the replica began to leave."""
    load: Load | None = None
    reports: int = 0


class Membership:
    """The state machine. `key` is the head's for proofs; `generation` is larger than any earlier coordinator's."""

    def __init__(self, key: str, timing: Timing, *, generation: int, at: float) -> None:
        self._key = key
        self._timing = timing
        self._generation = generation
        self._settles = at + timing.timeout_s
        """Until then, replicas of an earlier coordinator may send their first heartbeat to this one."""
        self._records: dict[ReplicaId, _Record] = {}
        self._left: dict[ReplicaId, int] = {}
        """By name: the largest epoch of a replica that has left, and therefore does not return."""
        self._changed = True
        self._published = -math.inf
        self._expiry = math.inf
        """Before this time no replica changes its state by silence."""

    def receive(self, message: ToCoordinator, at: float) -> None:
        """Handle one message, which arrived at `at`."""
        member = message.member
        if not hmac.compare_digest(message.proof.encode(), member.proof(self._key).encode()):
            return
        record = self._records.get(member.id)
        if record is None or record.member.epoch <= member.epoch:  # otherwise a late message of an earlier replica
            match message:
                case Heartbeat():
                    self._heartbeat(message, record, at)
                case Leave():
                    self._leave(message, record, at)

    def tick(self, at: float) -> View | None:
        """Let time pass. Returns the view to publish if one is due."""
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
        """When the next `tick` is due."""
        wait = PUBLISH_GAP_S if self._changed else self._timing.interval_s
        return min(self._expiry, self._published + wait)

    def view(self, at: float) -> View:
        """All replicas and their current states."""
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
            # Not earlier: API servers without a view in which it leaves may have sent it requests.
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
        """The coordinator was delayed: do not count that time, plus one interval, as silence of any replica."""
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
        """The time until which a replica may stay in its state without a sign of life."""
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
    """The load of a replica that sends heartbeats; None if it is silent."""
    return record.load if record.state in (State.UP, State.DRAINING) else None
