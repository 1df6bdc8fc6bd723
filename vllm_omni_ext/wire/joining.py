"""Messages between the head and headless nodes, whose replicas join the head. Tagged msgpack, versioned; no pickle."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from vllm_omni_ext.coordinator.members import Descriptor
from vllm_omni_ext.wire.coordination import MAX_MESSAGE_BYTES, Channel, Count, Message, Name, Text

MAX_ANSWER_BYTES = 256 * 1024
"""Longest reply; it contains the addresses of every API server."""


class Join(Descriptor, frozen=True, kw_only=True, tag="join"):
    """Request of one replica to join.

    Attributes:
        ticket: unique text of this attempt; a repeated request with the same ticket gets the same reply.
        host: the address of the replica's host from which it reaches the head.
        index: the index that the replica had before, if any.
    """

    ticket: Name
    host: Text
    index: Count | None = None


class Started(Message, frozen=True, tag="started"):
    """The replica that joined with this ticket is ready. Sent repeatedly; a head without this ticket refuses it."""

    ticket: Name
    pid: Count
    restarts: Count = 0


class Gone(Message, frozen=True, tag="gone"):
    """The replica that joined with this ticket has ended; `again` if it will be restarted.

    `log` is the path of its log file on its host; empty if it has none.
    """

    ticket: Name
    reason: str
    again: bool
    log: Text = ""


class Ping(Message, frozen=True, tag="ping"):
    """Checks whether the head is running."""


class Endpoints(Struct, frozen=True):
    """Addresses of one API server to which a replica connects."""

    input: str
    output: str


class Joined(Message, frozen=True, tag="joined"):
    """The values with which a joining replica starts.

    Attributes:
        deployment: unique text of this head.
        index: the replica's index in its stage.
        servers: the addresses of each API server, in order of their index.
        events: the coordinator's address for replicas.
        views: the coordinator's address for subscribers.
        drain_s: time that a leaving replica has to finish its requests, in seconds.
    """

    ticket: Name
    deployment: str
    index: Count
    servers: tuple[Endpoints, ...]
    events: str
    views: str
    drain_s: float


class Refusal(Message, frozen=True, tag="refused"):
    """Why the replica may not join, or is no longer a member."""

    ticket: str
    reason: str


class Pong(Message, frozen=True, tag="pong"):
    """Answer to `Ping`: the head is running; `deployment` identifies it."""

    deployment: str


ToHead = Join | Started | Gone | Ping
FromHead = Joined | Refusal | Pong

TO_HEAD: Channel[ToHead] = Channel(msgspec.msgpack.Decoder(ToHead), MAX_MESSAGE_BYTES)
FROM_HEAD: Channel[FromHead] = Channel(msgspec.msgpack.Decoder(FromHead), MAX_ANSWER_BYTES)
