"""What the head and its API servers tell each other. msgpack, tagged; never pickle. Replicas are written `talker/0`."""

from __future__ import annotations

import msgspec


class Listen(msgspec.Struct, frozen=True, tag=True):
    """Head to API server: a replica is going to start; `host` is where it reaches us, None if it runs here."""

    number: int
    replica: str
    host: str | None


class Listening(msgspec.Struct, frozen=True, tag=True):
    """API server to head: where that replica shall connect to; `error` if it cannot."""

    number: int
    input: str = ""
    output: str = ""
    error: str = ""


class ReplicaReady(msgspec.Struct, frozen=True, tag=True):
    """Head to API server: a replica that was listened for can be used."""

    replica: str
    host: str
    pid: int
    restarts: int


class ReplicaEnded(msgspec.Struct, frozen=True, tag=True):
    """Head to API server: a replica is gone; `again` if it will be started once more."""

    replica: str
    reason: str
    again: bool


class ServerReady(msgspec.Struct, frozen=True, tag=True):
    """API server to head: it answers requests."""


Message = Listen | Listening | ReplicaReady | ReplicaEnded | ServerReady
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """One message as bytes."""
    return _encoder.encode(message)


def decode(data: bytes) -> Message:
    """Read one message; msgspec.ValidationError for anything else."""
    message: Message = _decoder.decode(data)
    return message
