"""Streams of one-step requests: the mark of each in `PoolingParams.extra_kwargs`, and how one is refused.

A stage can only answer with a tensor: why it has nothing to say is UTF-8 in one of uint8, which no result is.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch

END = -1
"""Part number of a request that only ends its stream."""

FILLER = [0]
"""Prompt of a part without items: an engine takes no empty prompt."""


class PartMark(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which part of which stream a request is.

    Attributes:
        part: counts from 0, or END.
        last: the stream ends with this part.
        empty: the prompt is `FILLER`.
    """

    stream: str
    part: int
    last: bool
    empty: bool = False

    def as_extra(self) -> dict[str, Any]:
        """As plain data for `extra_kwargs`."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain

    @classmethod
    def of(cls, extra: Any) -> PartMark:
        """Read `extra_kwargs`; msgspec.ValidationError for anything else."""
        return msgspec.convert(extra, cls)

    @classmethod
    def end(cls, stream: str) -> PartMark:
        """The mark of a request that makes a stage forget a stream."""
        return cls(stream, END, last=True, empty=True)


def refusal(why: str) -> torch.Tensor:
    """The answer to a part that cannot be served."""
    return torch.frombuffer(bytearray(why.encode()), dtype=torch.uint8)


def refused(answer: torch.Tensor) -> str | None:
    """Why a part was not served; None if it was."""
    return answer.numpy().tobytes().decode() if answer.dtype == torch.uint8 else None
