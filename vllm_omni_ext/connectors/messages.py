"""Messages between the producer and the consumers of an edge, as tagged msgpack; never pickle.

A tensor's bytes follow its message in further ZeroMQ frames. Each message to a producer contains the token of its
address. A receiver drops and counts messages that raise `Malformed`.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from vllm_omni_ext.encoding import Channel, encode
from vllm_omni_ext.encoding import Message as _Message

__all__ = ["TO_CONSUMER", "TO_PRODUCER", "encode"]

MAX_MESSAGE_BYTES = 64 * 1024
"""Longest message, without the tensors' bytes."""

Request = Annotated[str, Meta(min_length=1, max_length=512)]
Name = Annotated[str, Meta(max_length=512)]
Text = Annotated[str, Meta(max_length=4096)]
Count = Annotated[int, Meta(ge=0, le=2**62)]


class Read(_Message, frozen=True, tag="read"):
    """Consumer to producer: send chunk `index` of a request. The reply has the same `number`."""

    token: Name
    number: Count
    request: Request
    index: Count


class Forget(_Message, frozen=True, tag="forget"):
    """Consumer to producer: free the request's chunks, unless another consumer has read the request later."""

    token: Name
    request: Request


class Chunk(_Message, frozen=True, tag="chunk"):
    """Producer to consumer: a tensor, whose bytes are in the frames that follow, or in the producer's memory.

    Attributes:
        number: number of the `Read` message that this message answers.
        place: position of the first byte in the producer's memory.
        memory: name of the producer's memory, if a consumer cannot derive it from the producer's address.
    """

    number: Count
    dtype: Name
    shape: Annotated[tuple[Count, ...], Meta(max_length=64)]
    nbytes: Count
    place: Count = 0
    memory: Name = ""


class Missing(_Message, frozen=True, tag="missing"):
    """Producer to consumer: the producer does not have the chunk."""

    number: Count


class Refused(_Message, frozen=True, tag="refused"):
    """Producer to consumer: the consumer's token is not that of the producer's address, so nothing is read."""

    number: Count
    reason: Text


ToProducer: TypeAlias = Read | Forget
ToConsumer: TypeAlias = Chunk | Missing | Refused

TO_PRODUCER: Channel[ToProducer] = Channel(msgspec.msgpack.Decoder(ToProducer), MAX_MESSAGE_BYTES)
TO_CONSUMER: Channel[ToConsumer] = Channel(msgspec.msgpack.Decoder(ToConsumer), MAX_MESSAGE_BYTES)
