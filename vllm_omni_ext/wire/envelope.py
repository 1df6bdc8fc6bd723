"""Packs messages of a stage into tensors, because vLLM's `EngineCoreOutput` has room for tokens and one tensor only.

A message is a magic prefix and the msgpack of a tagged Struct, in a one-dimensional uint8 tensor. Every other tensor,
also a uint8 tensor without the prefix (an image), is data of the model.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch

MAGIC = b"vllm-omni-msg/1\x00"
"""Prefix of 16 bytes. The probability that random pixels equal the prefix is 2**-128."""


class StageError(msgspec.Struct, frozen=True, array_like=True, tag="error"):
    """A stage could not process its input.

    Attributes:
        reason: sent to the client.
        retry: a later attempt may succeed, as the stage only has no room now.
        lost: the stage has dropped the state of the stream to which the part belongs. The stream is sent again.
    """

    reason: str
    retry: bool = False
    lost: bool = False


class StageProgress(msgspec.Struct, frozen=True, array_like=True, tag="progress"):
    """A stage has done `done` of `total` steps of a request."""

    done: int
    total: int


class HiddenStatesChunkReady(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="hidden_states"):
    """A chunk of hidden states has been put into a connector (`connectors.base`), or could not be put.

    The connector's producer in a replica stores the hidden states of a request as chunks 0, 1, ... of one name, in
    prompt order and without gaps.

    Attributes:
        source: address of the producer.
        name: name of the request at the producer.
        first: index of the chunk's first hidden state among all that the request exports.
        count: hidden states in the chunk.
        failed: error text if the chunk could not be put; "" if it was put.
        start: index of the first hidden state of chunk 0; above 0 if another replica has exported those before it.
    """

    source: str
    name: str
    first: int
    count: int
    failed: str = ""
    start: int = 0


Message = StageError | StageProgress | HiddenStatesChunkReady

_DECODER = msgspec.msgpack.Decoder(Message)


def pack(message: Message) -> torch.Tensor:
    """Return a message as a uint8 tensor [bytes]."""
    return torch.frombuffer(bytearray(MAGIC + msgspec.msgpack.encode(message)), dtype=torch.uint8)


def unpack(tensor: Any) -> Message | None:
    """Return the message in a tensor; None if the tensor is data of the model.

    Raises:
        msgspec.ValidationError, msgspec.DecodeError: the bytes after the prefix are not a message.
    """
    if tensor.dtype is not torch.uint8 or tensor.dim() != 1 or tensor.shape[0] < len(MAGIC):
        return None
    data = tensor.numpy().tobytes()
    return _DECODER.decode(data[len(MAGIC) :]) if data.startswith(MAGIC) else None
