"""Messages between a head and processes on other hosts whose replicas join it. Tagged msgpack, versioned; no pickle."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from vllm_omni_ext.wire.coordination import MAX_MESSAGE_BYTES, Channel, Count, Message, Name, Text

MAX_ANSWER_BYTES = 256 * 1024
"""Of an answer, which names the addresses of every API server."""


class Join(Message, frozen=True, tag="join"):
    """One replica wants to join.

    Attributes:
        ticket: text that no other attempt uses; the same one asked again gets the same answer.
        host: the address of its host, as it reaches the head.
        index: the index it had before, if it had one.
    """

    ticket: Name
    stage: Name
    model: Text
    config_hash: Text
    version: Text
    host: Text
    index: Count | None = None


class Started(Message, frozen=True, tag="started"):
    """The replica that joined with this ticket is ready; said again and again, and refused if the head knows it not."""

    ticket: Name
    pid: Count
    restarts: Count = 0


class Gone(Message, frozen=True, tag="gone"):
    """The replica that joined with this ticket has ended; `again` if another will take its place."""

    ticket: Name
    reason: str
    again: bool


class Ping(Message, frozen=True, tag="ping"):
    """Is the head there?"""


class Endpoints(Struct, frozen=True):
    """Where a replica connects to for one API server."""

    input: str
    output: str


class Joined(Message, frozen=True, tag="joined"):
    """What a replica needs to know to start.

    Attributes:
        deployment: text that no other head uses.
        index: of the replica in its stage.
        servers: for each API server, in their order.
        events: the coordinator's address for replicas.
        views: the coordinator's address for those who watch.
        drain_s: how long it may take to finish its requests when it leaves, in seconds.
    """

    ticket: Name
    deployment: str
    index: Count
    servers: tuple[Endpoints, ...]
    events: str
    views: str
    drain_s: float


class Refusal(Message, frozen=True, tag="refused"):
    """Why it may not join, or is no member any more."""

    ticket: str
    reason: str


class Pong(Message, frozen=True, tag="pong"):
    """The head is there, and it is this one."""

    deployment: str


ToHead = Join | Started | Gone | Ping
FromHead = Joined | Refusal | Pong

TO_HEAD: Channel[ToHead] = Channel(msgspec.msgpack.Decoder(ToHead), MAX_MESSAGE_BYTES)
FROM_HEAD: Channel[FromHead] = Channel(msgspec.msgpack.Decoder(FromHead), MAX_ANSWER_BYTES)
