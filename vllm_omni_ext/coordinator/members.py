"""The messages of replicas and the head to the coordinator, and of the coordinator to API servers, as frozen data."""

from __future__ import annotations

import enum
import hmac
from typing import TypeAlias

import msgspec
from msgspec import Struct

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


class State(enum.Enum):
    """State of a replica; the docstring of `membership` shows the transitions."""

    UP = "up"
    SUSPECT = "suspect"
    DOWN = "down"
    DRAINING = "draining"


ATTACHED = frozenset({State.UP, State.SUSPECT, State.DRAINING})
"""In these states a replica's requests continue."""


class Member(Struct, frozen=True, order=True):
    """A replica's name and its epoch, printed `talker/1#7`. The head gives every process of a replica both.

    The epoch distinguishes replicas that had the same name: a later one has a larger epoch.
    """

    stage: Name
    index: Count
    epoch: Epoch

    @property
    def id(self) -> ReplicaId:
        """The replica's name."""
        return ReplicaId(self.stage, self.index)

    def __str__(self) -> str:
        return f"{self.id}#{self.epoch}"

    def proof(self, key: str) -> str:
        """The text that shows that the head, which has the key, has given this name."""
        return hmac.digest(key.encode(), str(self).encode(), "sha256").hex()


class Entry(Struct, frozen=True):
    """One replica in a view. `load` is None without a recent report."""

    member: Member
    state: State
    load: Load | None = None


class Heartbeat(Message, frozen=True, tag="heartbeat"):
    """Replica to coordinator: a sign of life. The coordinator numbers the reports itself.

    `proof` is `Member.proof`, which no view contains.
    """

    member: Member
    load: Load
    proof: Text = ""


class Leave(Message, frozen=True, tag="leave"):
    """A replica ends, after its requests (`drain`) or now. Sent by the replica, its headless node, or the head."""

    member: Member
    drain: bool = True
    proof: Text = ""


class View(Message, frozen=True, kw_only=True, tag="view"):
    """Coordinator to API servers: all replicas at one moment, in order.

    Attributes:
        generation: grows with every start of the coordinator.
        settled: false while live replicas may not yet have sent a heartbeat to a new coordinator.
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


ToCoordinator: TypeAlias = Heartbeat | Leave

TO_COORDINATOR: Channel[ToCoordinator] = Channel(msgspec.msgpack.Decoder(ToCoordinator), MAX_MESSAGE_BYTES)
VIEWS: Channel[View] = Channel(msgspec.msgpack.Decoder(View), MAX_VIEW_BYTES)
