"""Messages of replicas to the coordinator, views of the coordinator, and the changes between two views. No I/O.

The coordinator is the process that tracks the states of all replicas (engine processes). A view is its message to API
servers with these states.
"""

from __future__ import annotations

import enum
import hmac
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from vllm_omni_ext.encoding import (
    MAX_MESSAGE_BYTES,
    MAX_VIEW_BYTES,
    Channel,
    Count,
    Epoch,
    Message,
    Name,
    Seconds,
    Text,
)
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.pool.load import Load
from vllm_omni_ext.pool.stage_pool import StagePool


class State(enum.Enum):
    """State of a replica in the coordinator; the docstring of `membership` shows the transitions.

    Attributes:
        UP: the replica sends heartbeats.
        SUSPECT: it has missed some heartbeats, and gets new requests only if no replica of its stage is UP.
        DOWN: it has sent no heartbeat within the timeout, and its requests are moved to other replicas.
        DRAINING: it is leaving: it finishes its requests, and gets no new ones.
    """

    UP = "up"
    SUSPECT = "suspect"
    DOWN = "down"
    DRAINING = "draining"


ATTACHED = frozenset({State.UP, State.SUSPECT, State.DRAINING})
"""States in which a replica keeps its requests. The requests of a replica in another state are moved."""


class Member(Struct, frozen=True, order=True):
    """One process of a replica: the replica's name (stage and index) and an epoch, printed `talker/1#7`.

    The head, the process that starts a deployment, assigns both. The epoch distinguishes the processes that had the
    same name: a later process has a larger epoch.
    """

    stage: Name
    index: Count
    epoch: Epoch

    @property
    def id(self) -> ReplicaId:
        """The replica's name, without the epoch."""
        return ReplicaId(self.stage, self.index)

    def __str__(self) -> str:
        return f"{self.id}#{self.epoch}"

    def proof(self, key: str) -> str:
        """Return the HMAC (hex) of name and epoch with the head's key.

        A replica sends this HMAC in its messages, as proof for the coordinator that the head has assigned name and
        epoch.
        """
        return hmac.digest(key.encode(), str(self).encode(), "sha256").hex()


class Entry(Struct, frozen=True):
    """The state of one replica in a `View`. `load` is None if the replica has sent no recent heartbeat."""

    member: Member
    state: State
    load: Load | None = None


class Heartbeat(Message, frozen=True, tag="heartbeat"):
    """Replica to coordinator: the replica is alive and has this load.

    Attributes:
        load: load of the replica. The coordinator sets `load.report` to the number of heartbeats received so far.
        proof: result of `Member.proof`; views do not contain it.
    """

    member: Member
    load: Load
    proof: Text = ""


class Leave(Message, frozen=True, tag="leave"):
    """To the coordinator: remove a replica, now or, if `drain` is true, once its requests have ended.

    Sent by the replica, by the headless node (the parent process of replicas that have joined a head), or by the head.

    Attributes:
        proof: result of `Member.proof`.
    """

    member: Member
    drain: bool = True
    proof: Text = ""


class View(Message, frozen=True, kw_only=True, tag="view"):
    """Coordinator to API servers: the states of all replicas, sorted by name.

    Attributes:
        generation: number of the coordinator's process; larger after every restart.
        settled: false while live replicas may not yet have sent a heartbeat to a restarted coordinator.
        timeout_s: API servers must not use the loads of a view that is older than this.
        dropped: number of malformed messages that the coordinator has dropped.
        pid: process id of the coordinator; 0 if unknown.
    """

    generation: Epoch
    settled: bool
    timeout_s: Seconds
    replicas: tuple[Entry, ...]
    dropped: Count = 0
    pid: Count = 0


ToCoordinator: TypeAlias = Heartbeat | Leave

TO_COORDINATOR: Channel[ToCoordinator] = Channel(msgspec.msgpack.Decoder(ToCoordinator), MAX_MESSAGE_BYTES)
VIEWS: Channel[View] = Channel(msgspec.msgpack.Decoder(View), MAX_VIEW_BYTES)


class Attach(Struct, frozen=True):
    """Change between two views: a replica's state is now in `ATTACHED`, for the first time or again."""

    member: Member


LEFT = "it has left"
"""Value of `Detach.reason` for a replica that the new view does not contain: it has left, or its process has ended."""


class Detach(Struct, frozen=True):
    """Change between two views: a replica's state is not in `ATTACHED` any more, so its requests must be moved."""

    member: Member
    reason: str


class Forget(Struct, frozen=True):
    """Change between two views: the coordinator has removed a replica. Its connection and metrics can be removed."""

    member: Member


Change: TypeAlias = Attach | Detach | Forget


class ViewDiff:
    """Keeps the last received view, and returns the changes between that view and the next one.

    A subscriber may miss views in between. The views of a restarted coordinator list only the replicas that have sent
    it a heartbeat. Until such a view is `settled`, replicas of earlier views keep their state, without a load, also if
    an earlier process of the same name sends heartbeats first.
    """

    def __init__(self) -> None:
        self.view: View | None = None
        self._kept: dict[ReplicaId, Entry] = {}

    def take(self, view: View) -> list[Change]:
        """Store the next view. Return the changes since the last view, in this order: `Detach`, `Forget`, `Attach`.

        In the first view with replicas each one has an `Attach`, and one that is DOWN a `Detach` after it.
        """
        before = self.view
        if before is not None and before.generation != view.generation:
            self._kept = {entry.member.id: entry for entry in _unloaded(before.replicas)}
        if self._kept:
            view = self._with_kept(view)
        self.view = view
        return _changes(before.replicas if before else (), view.replicas)

    def _with_kept(self, view: View) -> View:
        if view.settled:
            self._kept.clear()
        listed = {entry.member.id: entry for entry in view.replicas}
        for replica, kept in tuple(self._kept.items()):
            if replica in listed and listed[replica].member.epoch >= kept.member.epoch:
                del self._kept[replica]
        all_entries = (listed | self._kept).values()
        return replace(view, replicas=tuple(sorted(all_entries, key=lambda entry: entry.member)))

    def without_loads(self) -> View | None:
        """Remove the loads from the last view, and return the view; None before the first one.

        Called when no view has arrived for `View.timeout_s`: the loads are outdated.
        """
        if self.view is not None:
            self.view = replace(self.view, replicas=_unloaded(self.view.replicas))
        return self.view


def _unloaded(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    return tuple(replace(entry, load=None) for entry in entries)


def _changes(before: Sequence[Entry], after: Sequence[Entry]) -> list[Change]:
    if [(e.member, e.state) for e in before] == [(e.member, e.state) for e in after]:
        return []  # most views differ in loads only, and comparing costs less than hashing
    was, now = {e.member: e.state for e in before}, {e.member: e.state for e in after}
    attached_before, attached = _attached(was), _attached(now)
    if not was:  # an API server that is started while a replica does not answer is connected to it
        down = [Detach(m, f"it is {state.value}") for m, state in now.items() if m not in attached]
        return [*map(Attach, now), *down]
    found: list[Change] = [
        Detach(m, f"it is {now[m].value}" if m in now else LEFT) for m in attached_before if m not in attached
    ]
    found.extend(Forget(m) for m in was if m not in now)
    found.extend(Attach(m) for m in attached if m not in attached_before)
    return found


def _attached(states: dict[Member, State]) -> dict[Member, State]:
    return {member: state for member, state in states.items() if state in ATTACHED}


def apply_view(pool: StagePool, view: View) -> None:
    """Apply a view to the replicas of one stage's pool: their states, and their loads.

    An UP replica gets requests, a SUSPECT one only if no other replica does, a DRAINING or DOWN one no new ones.
    Replicas that are not in the pool are ignored: `Attach` adds them and `Detach` removes them.
    """
    there, known = set(pool.replicas), {}
    for entry in view.replicas:
        replica = entry.member.id
        if replica not in there:
            continue
        if entry.load is not None and entry.state in ATTACHED:
            known[replica] = entry.load
        match entry.state:
            case State.UP:
                pool.add(replica)
            case State.SUSPECT:
                pool.avoid(replica)
            case State.DRAINING | State.DOWN:
                pool.drain(replica)
    pool.publish(known)
