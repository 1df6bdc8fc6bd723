"""What the head and its API servers tell each other. msgpack, tagged; never pickle. Replicas are written `talker/0`."""

from __future__ import annotations

import msgspec


class ReplicaStarting(msgspec.Struct, frozen=True, tag=True):
    """Head to API server: a replica is going to start."""

    replica: str


class ReplicaStarted(msgspec.Struct, frozen=True, tag=True):
    """Head to API server: a replica that was announced before it had a process has this one (process id)."""

    replica: str
    pid: int


class ReplicaReady(msgspec.Struct, frozen=True, tag=True):
    """Head to API server: a replica can be used. Two file descriptors follow: of the listeners it has connected to."""

    replica: str
    host: str
    pid: int
    restarts: int
    input: str
    output: str


class ReplicaConnected(msgspec.Struct, frozen=True, tag=True):
    """API server to head: what a replica said when it was connected; a later API server must know it."""

    replica: str
    said: bytes


class Server(msgspec.Struct, frozen=True):
    """One API server; `restarts` counts how often it was started again."""

    index: int
    pid: int
    up: bool
    restarts: int


class Servers(msgspec.Struct, frozen=True, tag=True):
    """Head to API server: all of them."""

    servers: tuple[Server, ...]


class ServerLost(msgspec.Struct, frozen=True, tag=True):
    """Head to API server: another one has died at a Unix time, and the replicas must end its requests."""

    index: int
    at: float


class ReplicaEnded(msgspec.Struct, frozen=True, tag=True):
    """Head to API server: a replica is gone; `again` if it will be started once more."""

    replica: str
    reason: str
    again: bool


class ServerReady(msgspec.Struct, frozen=True, tag=True):
    """API server to head: it answers requests."""


Message = (
    ReplicaStarting
    | ReplicaStarted
    | ReplicaReady
    | ReplicaConnected
    | ReplicaEnded
    | ServerReady
    | Servers
    | ServerLost
)
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """One message as bytes."""
    return _encoder.encode(message)


def decode(data: bytes) -> Message:
    """Read one message; msgspec.ValidationError for anything else."""
    message: Message = _decoder.decode(data)
    return message
