"""Messages between producer and consumer of an edge. msgpack, tagged; never pickle. Tensor bytes follow in own frames.

A connection begins with `Hello`, which must contain the producer's token, and `Welcome`. A reader drops and counts
messages that raise `Malformed`.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta, Struct

from vllm_omni_ext.encoding import Channel, encode
from vllm_omni_ext.encoding import Message as _Message

__all__ = ["TO_CONSUMER", "TO_PRODUCER", "encode"]

MAX_MESSAGE_BYTES = 64 * 1024
"""Longest message, without the tensors' bytes."""

Request = Annotated[str, Meta(min_length=1, max_length=512)]
Name = Annotated[str, Meta(max_length=512)]
Text = Annotated[str, Meta(max_length=4096)]
Count = Annotated[int, Meta(ge=0, le=2**62)]


class Hello(_Message, frozen=True, tag="hello"):
    """Consumer to producer: the edge it reads, and the token from the producer's address."""

    token: Name
    edge: Name


class Open(_Message, frozen=True, tag="open"):
    """Consumer to producer: send the request's chunks, at most `window` unread bytes; 0: without limit."""

    request: Request
    window: Count


class Want(_Message, frozen=True, tag="want"):
    """Consumer to producer: send this chunk now (again)."""

    request: Request
    index: Count


class Taken(_Message, frozen=True, tag="taken"):
    """Consumer to producer: `nbytes` more bytes have been read."""

    request: Request
    nbytes: Count


class Forget(_Message, frozen=True, tag="forget"):
    """Consumer to producer: this consumer no longer needs the request and reads none of its memory."""

    request: Request


class Release(_Message, frozen=True, tag="release"):
    """Consumer to producer, after `Failed` or `Gone`: this consumer no longer reads the request's memory."""

    request: Request


class Welcome(_Message, frozen=True, tag="welcome"):
    """Producer to consumer: name and size of its memory, if the connector uses one; the format is the connector's."""

    memory: Name = ""
    size: Count = 0


class Refused(_Message, frozen=True, tag="refused"):
    """Producer to consumer: the consumer may not read from this producer."""

    reason: Text


class PartHead(Struct, frozen=True, array_like=True):
    """One part of a chunk; dtype "" is bytes. `offset` counts from the chunk's first byte."""

    dtype: Name
    shape: Annotated[tuple[Count, ...], Meta(max_length=64)]
    offset: Count
    nbytes: Count


class ChunkHeader(_Message, frozen=True, tag="chunk"):
    """Producer to consumer: a chunk of `nbytes` bytes, at `place` in the producer's memory or in `Slice`s to come."""

    request: Request
    index: Count
    last: bool
    meta: Annotated[bytes, Meta(max_length=16 * 1024)]
    parts: Annotated[tuple[PartHead, ...], Meta(max_length=256)]
    nbytes: Count
    place: Count = 0


class Slice(_Message, frozen=True, tag="slice"):
    """Producer to consumer, with a frame: the chunk's bytes from `start`. The `ChunkHeader` was sent before."""

    request: Request
    index: Count
    start: Count


class Failed(_Message, frozen=True, tag="failed"):
    """Producer to consumer: the request's chunks will not come."""

    request: Request
    reason: Text


class Gone(_Message, frozen=True, tag="gone"):
    """Producer to consumer: the request was forgotten."""

    request: Request


class Ping(_Message, frozen=True, tag="ping"):
    """Producer to consumer: no content. Sending it shows whether the connection still exists."""


ToProducer: TypeAlias = Hello | Open | Want | Taken | Forget | Release
ToConsumer: TypeAlias = Welcome | Refused | ChunkHeader | Slice | Failed | Gone | Ping

TO_PRODUCER: Channel[ToProducer] = Channel(msgspec.msgpack.Decoder(ToProducer), MAX_MESSAGE_BYTES)
TO_CONSUMER: Channel[ToConsumer] = Channel(msgspec.msgpack.Decoder(ToConsumer), MAX_MESSAGE_BYTES)
