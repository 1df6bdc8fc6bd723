"""Which replicas there are and how they are: events in, actions out. No I/O, no threads, no clock.

    JOINING --heartbeat--> UP --3 beats missed--> SUSPECT --timeout--> DOWN --long gone--> forgotten
                           ^ <----heartbeat-----' |                      |
                           '<-----heartbeat (attached again)-------------'
    any of them --leave--> DRAINING --empty, silent or too slow--> forgotten

A replica is *attached* while it is UP, SUSPECT or DRAINING: its requests go on. A replica that is forgotten frees its
name (`talker/1`), which the next one to join the stage gets, with another epoch: (name, epoch) is never used twice.

What is said of a replica counts only with the proof that its process or the head says it.

Times are seconds of one monotonic clock, given by the caller. Only `Tick` lets time pass: a caller that was held up
hands in what has arrived meanwhile before it ticks, and a tick that comes late (see `deadline`) puts everybody's
deadlines off, so that the coordinator's own delay is not taken for the replicas' silence.
"""

from __future__ import annotations

import hmac
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from vllm_omni_ext.coordinator.members import (
    ATTACHED,
    Action,
    Admit,
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
    Publish,
    Refuse,
    Register,
    RegisterAgain,
    Released,
    Reply,
    State,
    Subscribed,
    Tick,
    View,
)
from vllm_omni_ext.coordinator.timing import PUBLISH_GAP_S, Timing
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.pool.load import Load

MAX_REPLICAS = 4096
"""Replicas of one stage."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What every replica must agree with. `stages`: config hash by name."""

    model: str
    version: str
    stages: Mapping[str, str]

    def objection(self, replica: Descriptor) -> str:
        """Why a replica may not join; empty if it may."""
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
    descriptor: Descriptor
    heard: float
    """Last sign of life."""
    state: State = State.JOINING
    leaving: float = math.inf
    """When it began to leave."""
    load: Load | None = None
    reports: int = 0


@dataclass
class _Stage:
    by_index: dict[int, _Record] = field(default_factory=dict)

    def free(self, wanted: int | None) -> int | None:
        """The wanted index or else the lowest one that no replica bears, those that are down apart."""
        if wanted is not None and 0 <= wanted < MAX_REPLICAS and self._is_free(wanted):
            return wanted
        return next((index for index in range(MAX_REPLICAS) if self._is_free(index)), None)

    def _is_free(self, index: int) -> bool:
        record = self.by_index.get(index)
        return record is None or record.state is State.DOWN


class Membership:
    """The state machine. Replies among the actions go to who sent the event.

    Args:
        generation: larger than that of any coordinator before; epochs count from here.
        at: now.
        warrant: a secret with which the head speaks for every replica; empty: nobody does.
    """

    def __init__(self, expected: Expected, timing: Timing, *, generation: int, at: float, warrant: str = "") -> None:
        self._expected = expected
        self._warrant = warrant
        self._timing = timing
        self._generation = generation
        self._settles = at + timing.timeout_s
        """Until then replicas of a coordinator before this one are expected, and only names that are asked for are
        given: any other may be theirs."""
        self._next_epoch = generation
        self._stages = {name: _Stage() for name in expected.stages}
        self._by_instance: dict[str, _Record] = {}
        self._changed = True
        self._published = -math.inf
        self._expiry = math.inf
        """No replica can change by silence before this."""

    def handle(self, event: Event) -> list[Action]:
        """Take one event and say what must be done, in order."""
        match event:
            case Register():
                return list(self._register(event))
            case Heartbeat():
                return list(self._heartbeat(event))
            case Leave():
                return list(self._leave(event))
            case Subscribed():
                self._changed = True
                return []
            case Tick(at):
                return list(self._tick(at))

    def deadline(self) -> float:
        """When the next `Tick` is due."""
        wait = PUBLISH_GAP_S if self._changed else self._timing.interval_s
        return min(self._expiry, self._published + wait)

    def view(self, at: float) -> View:
        """All replicas as they are."""
        return View(
            generation=self._generation,
            settled=at >= self._settles,
            timeout_s=self._timing.timeout_s,
            replicas=tuple(
                Entry(record.member, record.state, _recent(record), record.descriptor.address)
                for _, stage in sorted(self._stages.items())
                for _, record in sorted(stage.by_index.items())
            ),
        )

    def _find(self, member: Member) -> _Record | None:
        stage = self._stages.get(member.id.stage)
        record = stage.by_index.get(member.id.index) if stage else None
        return record if record is not None and record.member == member else None

    def _may_speak(self, record: _Record, proof: str) -> bool:
        """Whether a message about a replica comes from its process or from the head."""
        said = proof.encode()
        known = (record.descriptor.instance, self._warrant)
        return any(each and hmac.compare_digest(said, each.encode()) for each in known)

    def _register(self, event: Register) -> Iterator[Action]:
        descriptor = event.descriptor
        objection = self._expected.objection(descriptor)
        known = self._by_instance.get(descriptor.instance)
        if not objection and known is not None and known.descriptor.stage != descriptor.stage:
            objection = f"instance '{descriptor.instance}' is {known.member.id} already"
        if objection:
            yield Refuse(objection)
            return
        if known is None:
            stage = self._stages[descriptor.stage]
            index = stage.free(event.index)
            if index is None:
                yield Refuse(f"stage '{descriptor.stage}' has {MAX_REPLICAS} replicas, which is the most there can be")
                return
            if event.at < self._settles and index != event.index:
                yield NotYet()
                return
            if index in stage.by_index:
                yield from self._forget(stage.by_index[index], "")
            known = self._join(event, index)
        yield Admit(known.member, self._timing.interval_s)

    def _join(self, event: Register, index: int) -> _Record:
        # An epoch from before this generation, or of it, is its bearer's own: nobody else was ever given it.
        if event.epoch is not None and event.index == index and 0 <= event.epoch < self._next_epoch:
            epoch = event.epoch
        else:
            epoch, self._next_epoch = self._next_epoch, self._next_epoch + 1
        descriptor = event.descriptor
        record = _Record(Member(ReplicaId(descriptor.stage, index), epoch), descriptor, event.at)
        self._stages[descriptor.stage].by_index[index] = record
        self._by_instance[descriptor.instance] = record
        self._await(record)
        self._changed = True
        return record

    def _heartbeat(self, event: Heartbeat) -> Iterator[Action]:
        record = self._find(event.member)
        if record is None or not self._may_speak(record, event.proof):
            yield self._unknown(event.member)
            return
        record.heard = max(record.heard, event.at)
        before, record.reports = record.load, record.reports + 1
        record.load = replace(event.load, report=record.reports)
        self._changed |= before is None or replace(before, report=record.reports) != record.load
        if record.state is not State.DRAINING:
            yield from self._enter(record, State.UP, "")
        elif event.load.queue == 0 and event.at >= record.leaving + self._timing.interval_s:
            # Not earlier: requests may have been sent to it before it was known to leave.
            yield Released(record.member)
            yield from self._forget(record, "it has left")

    def _leave(self, event: Leave) -> Iterator[Action]:
        record = self._find(event.member)
        if record is None:  # one with requests must be known to be leaving, so that they are not given up
            yield self._unknown(event.member) if event.drain else Released(event.member)
        elif not self._may_speak(record, event.proof):
            return
        elif not event.drain or record.state is State.DOWN:
            yield Released(record.member)
            yield from self._forget(record, "it has left")
        elif record.state is not State.DRAINING:
            record.heard = max(record.heard, event.at)
            record.leaving = event.at
            yield from self._enter(record, State.DRAINING, "")

    def _unknown(self, member: Member) -> Reply:
        if member.id.stage in self._stages:
            return RegisterAgain(member)
        return Refuse(f"there is no stage '{member.id.stage}'; there are {', '.join(sorted(self._stages)) or 'none'}")

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
            yield Publish(self.view(at))

    def _excuse(self, at: float, late: float) -> None:
        """The coordinator itself was held up: that time, and one interval more, is nobody's silence."""
        for record in self._by_instance.values():
            record.heard = min(at, record.heard + late + self._timing.interval_s)

    def _expire(self, record: _Record, at: float) -> Iterator[Action]:
        while at >= self._patience(record):
            match record.state:
                case State.UP:
                    yield from self._enter(record, State.SUSPECT, "")
                case State.SUSPECT:
                    reason = f"it has not been heard of for {at - record.heard:.1f} s"
                    yield from self._enter(record, State.DOWN, reason)
                case _:
                    silent = at >= record.heard + self._timing.timeout_s
                    yield from self._forget(record, "it fell silent" if silent else "its requests took too long")
                    return
        self._expiry = min(self._expiry, self._patience(record))

    def _patience(self, record: _Record) -> float:
        """Until when a replica may stay in its state without a sign of life."""
        timing = self._timing
        match record.state:
            case State.UP:
                return record.heard + timing.suspect_s
            case State.JOINING | State.SUSPECT:
                return record.heard + timing.timeout_s
            case State.DOWN:
                return record.heard + timing.forget_s
            case State.DRAINING:
                return min(record.heard + timing.timeout_s, record.leaving + timing.drain_s)

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
        del self._stages[record.member.id.stage].by_index[record.member.id.index]
        del self._by_instance[record.descriptor.instance]
        self._changed = True
        if record.state in ATTACHED:
            yield Detach(record.member, reason)
        yield Forget(record.member)


def _recent(record: _Record) -> Load | None:
    """The load of a replica that is heard of."""
    return record.load if record.state in (State.UP, State.DRAINING) else None
