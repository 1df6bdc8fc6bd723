"""Messages of the flow to the painter. Pure."""

from __future__ import annotations

from typing import Annotated

import msgspec


class Paint(msgspec.Struct, frozen=True, kw_only=True, tag="paint"):
    """One picture of the part's prompt, `width` x `height` pixels, made from the noise of `seed`."""

    width: int
    height: int
    seed: int


class PaintParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of the painter: the number of its steps, and how far colours are from grey."""

    steps: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 3
    contrast: Annotated[float, msgspec.Meta(gt=0, le=10)] = 1.0
