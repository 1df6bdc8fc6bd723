"""State machine of the replicas of a deployment: events in, actions out. No I/O, no threads, no clock.

    JOINING --heartbeat--> UP --3 beats missed--> SUSPECT --timeout--> DOWN --long gone--> forgotten
                           ^ <----heartbeat-----' |                      |
                           '<-----heartbeat (attached again)-------------'
    any state --leave--> DRAINING --empty, silent or too slow--> forgotten

A replica is *attached* while it is UP, SUSPECT or DRAINING: its requests continue. A forgotten replica frees its name
(`talker/1`). The next replica to join the stage gets the name with another epoch: (name, epoch) is never used twice.

A message about a replica counts only with a proof that the replica's process or the head sent it.

Times are seconds of one monotonic clock, passed in by the caller. Only `Tick` lets time pass: a delayed caller first
passes in the events that have arrived, then ticks. A late tick (see `deadline`) extends all deadlines, so that a delay
of the coordinator is not counted as silence of the replicas.
"""

from __future__ import annotations

import hmac
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from vllm_omni_ext.coordinator.members import (
    ATTACHED,
    LEFT,
    Action,
    Admitted,
    Attach,
    Descriptor,
    Detach,
    Entry,
    Event,
    Forget,
    Heartbeat,
    Leave,
    Member,
    NotYet,
    Refused,
    Register,
    RegisterAgain,
    Released,
    State,
    Subscribed,
    Tick,
    ToReplica,
    View,
)
from vllm_omni_ext.coordinator.timing import PUBLISH_GAP_S, Timing
from vllm_omni_ext.pool.load import Load

MAX_REPLICAS = 4096
"""Most replicas of one stage."""

ENDED = "its process has ended"
"""Reason of `Detach` for a replica whose end the head has reported."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Values that every replica must have. `stages`: config hash by stage name."""

    model: str
    version: str
    stages: Mapping[str, str]

    def objection(self, replica: Descriptor) -> str:
        """The reason to refuse a replica; empty if it may join."""
        if replica.stage not in self.stages:
            return f"there is no stage '{replica.stage}'; there are {', '.join(sorted(self.stages)) or 'none'}"
        compared = (
            ("model", replica.model, self.model),
            ("package version", replica.version, self.version),
            (f"configuration hash of stage '{replica.stage}'", replica.config_hash, self.stages[replica.stage]),
        )
        return "; ".join(f"{what} is '{its}' there and '{ours}' here" for what, its, ours in compared if its != ours)


@dataclass(slots=True)
class _Record:
    member: Member
    descriptor: Register
    last_seen: float
    """Last sign of life."""
    state: State = State.JOINING
    leaving: float = math.inf
    """When the replica began to leave."""
    load: Load | None = None
    reports: int = 0


@dataclass
class _Stage:
    by_index: dict[int, _Record] = field(default_factory=dict)

    def free(self, wanted: int | None) -> int | None:
        """The wanted index if it is free, else the lowest free one. Free: no replica has it, or a DOWN one."""
        if wanted is not None and 0 <= wanted < MAX_REPLICAS and self._is_free(wanted):
            return wanted
        return next((index for index in range(MAX_REPLICAS) if self._is_free(index)), None)

    def _is_free(self, index: int) -> bool:
        record = self.by_index.get(index)
        return record is None or record.state is State.DOWN


class Membership:
    """The state machine. Replies among the actions go to the sender of the event.

    Args:
        generation: larger than that of any earlier coordinator; epochs count from here.
        at: now.
        warrant: secret with which the head may send messages for any replica; empty: it may not.
    """

    def __init__(self, expected: Expected, timing: Timing, *, generation: int, at: float, warrant: str = "") -> None:
        self._expected = expected
        self._warrant = warrant
        self._timing = timing
        self._generation = generation
        self._settles = at + timing.timeout_s
        """Until then, replicas of an earlier coordinator may register again. Any free name may be one of theirs, so a
        replica only gets a name that it requests."""
        self._next_epoch = generation
        self._stages = {name: _Stage() for name in expected.stages}
        self._by_instance: dict[str, _Record] = {}
        self._changed = True
        self._published = -math.inf
        self._expiry = math.inf
        """Before this time no replica changes its state by silence."""

    def handle(self, event: Event, at: float) -> list[Action]:
        """Handle one event, which arrived at `at`; return the actions to execute, in order."""
        match event:
            case Register():
                return list(self._register(event, at))
            case Heartbeat():
                return list(self._heartbeat(event, at))
            case Leave():
                return list(self._leave(event, at))
            case Subscribed():
                self._changed = True
                return []
            case Tick():
                return list(self._tick(at))

    def deadline(self) -> float:
        """When the next `Tick` is due."""
        wait = PUBLISH_GAP_S if self._changed else self._timing.interval_s
        return min(self._expiry, self._published + wait)

    def view(self, at: float) -> View:
        """All replicas and their current states."""
        return View(
            generation=self._generation,
            settled=at >= self._settles,
            timeout_s=self._timing.timeout_s,
            replicas=tuple(
                Entry(record.member, record.state, _recent(record))
                for _, stage in sorted(self._stages.items())
                for _, record in sorted(stage.by_index.items())
            ),
        )

    def _find(self, member: Member) -> _Record | None:
        stage = self._stages.get(member.stage)
        record = stage.by_index.get(member.index) if stage else None
        return record if record is not None and record.member == member else None

    def _may_speak(self, record: _Record, proof: str) -> bool:
        """Whether a message about a replica comes from its process or from the head."""
        encoded = proof.encode()
        known = (record.descriptor.instance, self._warrant)
        return any(each and hmac.compare_digest(encoded, each.encode()) for each in known)

    def _register(self, event: Register, at: float) -> Iterator[Action]:
        objection = self._expected.objection(event)
        known = self._by_instance.get(event.instance)
        if not objection and known is not None and known.descriptor.stage != event.stage:
            objection = f"instance '{event.instance}' is {known.member.id} already"
        if objection:
            yield Refused(objection)
            return
        if known is None:
            stage = self._stages[event.stage]
            index = stage.free(event.index)
            if index is None:
                yield Refused(f"stage '{event.stage}' has {MAX_REPLICAS} replicas, which is the most there can be")
                return
            if at < self._settles and index != event.index:
                yield NotYet()
                return
            if index in stage.by_index:
                yield from self._forget(stage.by_index[index], "")
            known = self._join(event, index, at)
        yield Admitted(known.member, self._timing.interval_s)

    def _join(self, event: Register, index: int, at: float) -> _Record:
        # Epochs below `_next_epoch` were issued once, so a replica that names one may keep it.
        if event.epoch is not None and event.index == index and 0 <= event.epoch < self._next_epoch:
            epoch = event.epoch
        else:
            epoch, self._next_epoch = self._next_epoch, self._next_epoch + 1
        record = _Record(Member(event.stage, index, epoch), event, at)
        self._stages[event.stage].by_index[index] = record
        self._by_instance[event.instance] = record
        self._await(record)
        self._changed = True
        return record

    def _heartbeat(self, event: Heartbeat, at: float) -> Iterator[Action]:
        record = self._find(event.member)
        if record is None or not self._may_speak(record, event.proof):
            yield self._unknown(event.member)
            return
        record.last_seen = max(record.last_seen, at)
        before, record.reports = record.load, record.reports + 1
        record.load = replace(event.load, report=record.reports)
        self._changed |= before is None or replace(before, report=record.reports) != record.load
        if record.state is not State.DRAINING:
            yield from self._enter(record, State.UP, "")
        elif event.load.queue == 0 and at >= record.leaving + self._timing.interval_s:
            # Not earlier: API servers without a view in which it leaves may have sent it requests.
            yield Released(record.member)
            yield from self._forget(record, LEFT)

    def _leave(self, event: Leave, at: float) -> Iterator[Action]:
        record = self._find(event.member)
        if record is None:  # it must register again before it drains: the requests of an unlisted replica are given up
            yield self._unknown(event.member) if event.drain else Released(event.member)
        elif not self._may_speak(record, event.proof):
            return
        elif not event.drain or record.state is State.DOWN:
            yield Released(record.member)
            by_itself = event.proof == record.descriptor.instance
            yield from self._forget(record, LEFT if by_itself else ENDED)
        elif record.state is not State.DRAINING:
            record.last_seen = max(record.last_seen, at)
            record.leaving = at
            yield from self._enter(record, State.DRAINING, "")

    def _unknown(self, member: Member) -> ToReplica:
        if member.stage in self._stages:
            return RegisterAgain(member)
        return Refused(f"there is no stage '{member.stage}'; there are {', '.join(sorted(self._stages)) or 'none'}")

    def _tick(self, at: float) -> Iterator[Action]:
        late = at - self.deadline()
        if late > self._timing.interval_s:
            self._excuse(at, late)
        if at >= self._expiry:
            self._expiry = math.inf
            for stage in self._stages.values():
                for record in tuple(stage.by_index.values()):
                    yield from self._expire(record, at)
        if at >= self._published + (PUBLISH_GAP_S if self._changed else self._timing.interval_s):
            self._published, self._changed = at, False
            yield self.view(at)

    def _excuse(self, at: float, late: float) -> None:
        """The coordinator was delayed: do not count that time, plus one interval, as silence of any replica."""
        for record in self._by_instance.values():
            record.last_seen = min(at, record.last_seen + late + self._timing.interval_s)

    def _expire(self, record: _Record, at: float) -> Iterator[Action]:
        while at >= self._patience(record):
            match record.state:
                case State.UP:
                    yield from self._enter(record, State.SUSPECT, "")
                case State.SUSPECT:
                    reason = f"it has sent nothing for {at - record.last_seen:.1f} s"
                    yield from self._enter(record, State.DOWN, reason)
                case _:
                    silent = at >= record.last_seen + self._timing.timeout_s
                    yield from self._forget(record, "it fell silent" if silent else "its requests took too long")
                    return
        self._expiry = min(self._expiry, self._patience(record))

    def _patience(self, record: _Record) -> float:
        """The time until which a replica may stay in its state without a sign of life."""
        timing = self._timing
        match record.state:
            case State.UP:
                return record.last_seen + timing.suspect_s
            case State.JOINING | State.SUSPECT:
                return record.last_seen + timing.timeout_s
            case State.DOWN:
                return record.last_seen + timing.forget_s
            case State.DRAINING:
                return min(record.last_seen + timing.timeout_s, record.leaving + timing.drain_s)

    def _await(self, record: _Record) -> None:
        self._expiry = min(self._expiry, self._patience(record))

    def _enter(self, record: _Record, state: State, reason: str) -> Iterator[Action]:
        if record.state is state:
            return
        before, record.state = record.state, state
        self._changed = True
        self._await(record)
        if before not in ATTACHED and state in ATTACHED:
            yield Attach(record.member)
        elif before in ATTACHED and state not in ATTACHED:
            yield Detach(record.member, reason)

    def _forget(self, record: _Record, reason: str) -> Iterator[Action]:
        del self._stages[record.member.stage].by_index[record.member.index]
        del self._by_instance[record.descriptor.instance]
        self._changed = True
        if record.state in ATTACHED:
            yield Detach(record.member, reason)
        yield Forget(record.member)


def _recent(record: _Record) -> Load | None:
    """The load of a replica that sends heartbeats; None if it is silent."""
    return record.load if record.state in (State.UP, State.DRAINING) else None
