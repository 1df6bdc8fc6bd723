"""Messages between the head and its API servers. msgpack, tagged; never pickle. Replicas are written `talker/0`."""

from __future__ import annotations

import msgspec

from vllm_omni_ext.wire.operator_state import Change


class ReplicaStarting(msgspec.Struct, frozen=True, tag=True):
    """Head to API server: a replica will start."""

    replica: str


class ReplicaStarted(msgspec.Struct, frozen=True, tag=True):
    """Head to API server: the process id of a replica that was announced before its process existed."""

    replica: str
    pid: int


class ReplicaReady(msgspec.Struct, frozen=True, tag=True):
    """Head to API server: a replica is ready. Two file descriptors follow, of the listeners it has connected to."""

    replica: str
    host: str
    pid: int
    restarts: int
    input: str
    output: str


class ReplicaConnected(msgspec.Struct, frozen=True, tag=True):
    """API server to head: the ready response of a connected replica. A restarted API server needs it."""

    replica: str
    ready_response: bytes


class Server(msgspec.Struct, frozen=True):
    """One API server; `restarts` counts its restarts."""

    index: int
    pid: int
    up: bool
    restarts: int


class Servers(msgspec.Struct, frozen=True, tag=True):
    """Head to API server: the state of all API servers."""

    servers: tuple[Server, ...]


class ServerLost(msgspec.Struct, frozen=True, tag=True):
    """Head to API server: another API server died at the Unix time `at`; the replicas must end its requests."""

    index: int
    at: float


class ReplicaEnded(msgspec.Struct, frozen=True, tag=True):
    """Head to API server: a replica has ended; `again` if it will be restarted."""

    replica: str
    reason: str
    again: bool


class ServerReady(msgspec.Struct, frozen=True, tag=True):
    """API server to head: the API server accepts requests."""


class ChangeAsked(msgspec.Struct, frozen=True, tag=True):
    """API server to head: an operator changes something. `number` is the API server's own, for `ChangeSettled`."""

    number: int
    change: Change


class ChangeMade(msgspec.Struct, frozen=True, tag=True):
    """Head to API server: a change; the API server answers with `ChangeKnown` of the same version."""

    version: int
    change: Change


class ChangeKnown(msgspec.Struct, frozen=True, tag=True):
    """API server to head: it acts on a change from now on."""

    version: int


class ChangeSettled(msgspec.Struct, frozen=True, tag=True):
    """Head to API server: all API servers act on the change that this one has requested."""

    number: int


Message = (
    ReplicaStarting
    | ReplicaStarted
    | ReplicaReady
    | ReplicaConnected
    | ReplicaEnded
    | ServerReady
    | Servers
    | ServerLost
    | ChangeAsked
    | ChangeMade
    | ChangeKnown
    | ChangeSettled
)
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Return a message as bytes."""
    return _encoder.encode(message)


def decode(data: bytes) -> Message:
    """Read one message; msgspec.ValidationError for anything else."""
    message: Message = _decoder.decode(data)
    return message
