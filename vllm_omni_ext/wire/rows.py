"""Hidden rows that travel beside the messages: what is said about them in a step's output and in a hand-over.

The rows of a request lie with the producer of a replica as chunks 0, 1, ... of one name, in prompt order and without
gaps. What passes through the API server is a `Notice` for each chunk, as the one tensor that a step's output can hold,
and `Given` in the payload of the stage that reads them.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from vllm_omni_ext.wire.handoff import GIVEN


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """A chunk has been put, or will never be.

    Attributes:
        source: address of the producer.
        name: of the request there.
        first: index of the chunk's first row among all that the request exports.
        count: rows in the chunk.
        failed: why there is no chunk; "" if there is one.
    """

    source: str
    name: str
    first: int
    count: int
    failed: str = ""

    def tensor(self) -> torch.Tensor:
        """As a uint8 tensor."""
        return torch.frombuffer(bytearray(msgspec.msgpack.encode(self)), dtype=torch.uint8)

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Notice:
        """Read `tensor`; msgspec.ValidationError or DecodeError for anything else."""
        return msgspec.msgpack.decode(tensor.numpy().tobytes(), type=cls)


class Given(msgspec.Struct, frozen=True, kw_only=True):
    """The first `count` rows of a request can be taken from the producer at `source`, under `name`."""

    source: str
    name: str
    count: int

    def plain(self) -> dict[str, Any]:
        """As plain data, for a payload."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found

    @classmethod
    def of(cls, payload: Any) -> Given | None:
        """What a prompt or a chunk says about rows; None if nothing."""
        given = payload.get(GIVEN)
        return None if given is None else msgspec.convert(given, cls)
