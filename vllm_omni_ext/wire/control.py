"""What the head and its API servers tell each other. msgpack, tagged; never pickle."""

from __future__ import annotations

import msgspec


class ReplicaDied(msgspec.Struct, frozen=True, tag=True):
    """A replica's process has ended; `replica` is written `talker/0`."""

    replica: str
    reason: str


class ServerReady(msgspec.Struct, frozen=True, tag=True):
    """From an API server to the head: it answers requests."""


Message = ReplicaDied | ServerReady
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """One message as bytes."""
    return _encoder.encode(message)


def decode(data: bytes) -> Message:
    """Read one message; msgspec.ValidationError for anything else."""
    message: Message = _decoder.decode(data)
    return message
