"""The messages between coordinator, replicas and API servers, as frozen data.

Each message has one direction and is decoded by `TO_COORDINATOR`, `TO_REPLICA` or `VIEWS`.
"""

from __future__ import annotations

import enum
from typing import TypeAlias

import msgspec
from msgspec import Struct

from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.pool.load import Load
from vllm_omni_ext.wire.coordination import (
    MAX_MESSAGE_BYTES,
    MAX_REPLY_BYTES,
    MAX_VIEW_BYTES,
    Channel,
    Count,
    Epoch,
    Message,
    Name,
    Seconds,
    Text,
)


class State(enum.Enum):
    """State of a replica; the docstring of `membership` shows the transitions."""

    JOINING = "joining"
    UP = "up"
    SUSPECT = "suspect"
    DOWN = "down"
    DRAINING = "draining"


ATTACHED = frozenset({State.UP, State.SUSPECT, State.DRAINING})
"""In these states a replica's requests continue."""


class Member(Struct, frozen=True, order=True):
    """A replica's name and its epoch, printed `talker/1#7`. The epoch distinguishes replicas that had the same name."""

    stage: Name
    index: Count
    epoch: Epoch

    @property
    def id(self) -> ReplicaId:
        """The replica's name."""
        return ReplicaId(self.stage, self.index)

    def __str__(self) -> str:
        return f"{self.id}#{self.epoch}"


class Entry(Struct, frozen=True):
    """One replica in a view. `load` is None without a recent report."""

    member: Member
    state: State
    load: Load | None = None


class Descriptor(Message, frozen=True, kw_only=True):
    """Values that must be equal for all replicas. `config_hash` covers all settings that a stage's replicas share."""

    stage: Name
    model: Text
    config_hash: Text
    version: Text


class Register(Descriptor, frozen=True, kw_only=True, tag="register"):
    """Replica to coordinator: request to join.

    Attributes:
        instance: unique text that cannot be guessed, e.g. a random UUID; it authenticates the replica's messages.
        index: the preferred index: that of the plan, or the replica's last one.
        epoch: the epoch that the replica had with that index; it is assigned again if the name is free.
    """

    instance: Name
    index: Count | None = None
    epoch: Epoch | None = None


class Heartbeat(Message, frozen=True, tag="heartbeat"):
    """Replica to coordinator: a sign of life. The coordinator numbers the reports itself. `proof`: see `Leave`."""

    member: Member
    load: Load
    proof: Text = ""


class Leave(Message, frozen=True, tag="leave"):
    """Replica to coordinator: the replica ends, after its requests (`drain`) or now.

    `proof` is the replica's `Register.instance`, which no view contains, or the head's warrant.
    """

    member: Member
    drain: bool = True
    proof: Text = ""


class Admitted(Message, frozen=True, tag="admitted"):
    """Coordinator to replica: the replica has joined as `member` and must send a heartbeat every `interval_s`."""

    member: Member
    interval_s: Seconds


class Refused(Message, frozen=True, tag="refused"):
    """Coordinator to replica: the replica may not join."""

    reason: str


class NotYet(Message, frozen=True, tag="not_yet"):
    """Coordinator to replica: register again later. The coordinator is new, and free names may belong to replicas."""


class RegisterAgain(Message, frozen=True, tag="register_again"):
    """Coordinator to replica: `member` is unknown (new coordinator, or the replica was silent for too long)."""

    member: Member


class Released(Message, frozen=True, tag="released"):
    """Coordinator to replica: `member` has left; its process may end."""

    member: Member


class View(Message, frozen=True, kw_only=True, tag="view"):
    """Coordinator to API servers: all replicas at one moment, in order.

    Attributes:
        generation: grows with every start of the coordinator.
        settled: false while live replicas may not yet have registered with a new coordinator.
        timeout_s: loads in a view older than this must not be trusted.
        dropped: malformed messages that the coordinator has dropped.
        pid: process id of the coordinator; 0 if unknown.
    """

    generation: Epoch
    settled: bool
    timeout_s: Seconds
    replicas: tuple[Entry, ...]
    dropped: Count = 0
    pid: Count = 0


class Subscribed(Struct, frozen=True):
    """Inside the coordinator: a new subscriber needs the view."""


class Tick(Struct, frozen=True):
    """Inside the coordinator: time has passed."""


class Attach(Struct, frozen=True):
    """A replica can be used, for the first time or again."""

    member: Member


LEFT = "it has left"
"""Reason of `Detach` for a replica that left by itself, after its requests or at the end of its engine."""


class Detach(Struct, frozen=True):
    """The requests of a replica are lost."""

    member: Member
    reason: str


class Forget(Struct, frozen=True):
    """A replica's name is free; its metrics labels and connections can be removed."""

    member: Member


ToCoordinator: TypeAlias = Register | Heartbeat | Leave
ToReplica: TypeAlias = Admitted | Refused | NotYet | RegisterAgain | Released
Event: TypeAlias = ToCoordinator | Subscribed | Tick
Action: TypeAlias = ToReplica | Attach | Detach | Forget | View
"""Replies go to the sender of the event, views to all subscribers."""

TO_COORDINATOR: Channel[ToCoordinator] = Channel(msgspec.msgpack.Decoder(ToCoordinator), MAX_MESSAGE_BYTES)
TO_REPLICA: Channel[ToReplica] = Channel(msgspec.msgpack.Decoder(ToReplica), MAX_REPLY_BYTES)
VIEWS: Channel[View] = Channel(msgspec.msgpack.Decoder(View), MAX_VIEW_BYTES)
