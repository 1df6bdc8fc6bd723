"""Encodes and decodes the messages of the control plane: versioned, tagged msgpack; never pickle.

The control plane is the traffic of the head, the coordinator, headless nodes (`vllm serve --headless`), replicas and
API servers besides requests and outputs: joining, heartbeats, states of replicas.

Compatibility: packages of different versions exchange only `Join` and its `Refusal`, which contains both versions. A
field with a default may be added to these two messages, because receivers ignore unknown fields. Every other change of
them needs another `PROTOCOL`. A message of another protocol is refused with a text that contains both protocols.
"""

from __future__ import annotations

from typing import Annotated, Generic, TypeVar

import msgspec
from msgspec import Meta, Struct

from vllm_omni_ext.errors import OmniError

PROTOCOL = 1

MAX_MESSAGE_BYTES = 4096
"""Longest message that a replica or a headless node may send."""

MAX_VIEW_BYTES = 16 * 1024 * 1024
"""Longest view, a message of the coordinator with the states of all replicas: a few hundred bytes for each replica."""

Text = Annotated[str, Meta(max_length=512)]
Name = Annotated[str, Meta(min_length=1, max_length=128)]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Epoch = Annotated[int, Meta(ge=0, le=2**62)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]


class Malformed(OmniError):
    """The received bytes are not a message of the expected kind.

    Attributes:
        protocol: the sender's protocol if it differs, else None.
    """

    def __init__(self, message: str, *, protocol: int | None = None) -> None:
        super().__init__(message)
        self.protocol = protocol


class _Versioned(Struct, frozen=True, kw_only=True):
    protocol: int = 0


class Message(Struct, frozen=True, kw_only=True):
    """Base class of all messages of the control plane."""

    protocol: int = PROTOCOL


Kind = TypeVar("Kind")


class Channel(Generic[Kind]):
    """Decodes the messages of one direction, e.g. from replicas to the coordinator.

    Args:
        decoder: msgspec's decoder of the direction's message types.
        limit: longest message, in bytes.
    """

    def __init__(self, decoder: msgspec.msgpack.Decoder[Kind], limit: int) -> None:
        self._decoder = decoder
        self.limit = limit

    def decode(self, data: bytes) -> Kind:
        """Decode one message; raise `Malformed` if the data is too long, of another protocol, or not a message."""
        if len(data) > self.limit:
            raise Malformed(f"a message of {len(data)} bytes; the longest allowed has {self.limit}")
        try:
            protocol = _versions.decode(data).protocol
            if protocol != PROTOCOL:
                raise Malformed(f"protocol {protocol} there and {PROTOCOL} here", protocol=protocol)
            return self._decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise Malformed(str(error)) from error


_versions = msgspec.msgpack.Decoder(_Versioned)
_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """Return a message as bytes."""
    return _encoder.encode(message)
