"""What the head tells its API servers. msgpack, tagged; never pickle."""

from __future__ import annotations

import msgspec


class ReplicaDied(msgspec.Struct, frozen=True, tag=True):
    """A replica's process has ended; `replica` is written `talker/0`."""

    replica: str
    reason: str


Message = ReplicaDied
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """One message as bytes."""
    return _encoder.encode(message)


def decode(data: bytes) -> Message:
    """Read one message; msgspec.ValidationError for anything else."""
    return _decoder.decode(data)
