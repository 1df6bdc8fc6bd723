"""Messages of the flow to the denoiser. Pure."""

from __future__ import annotations

from typing import Annotated

import msgspec


class Paint(msgspec.Struct, frozen=True, kw_only=True, tag="paint"):
    """One picture.

    Attributes:
        tokens: what the picture shows, as token ids.
        width, height: in pixels.
        seed: of the noise from which the picture is made.
        previews: how many unfinished pictures are wanted on the way.
    """

    tokens: list[int]
    width: int
    height: int
    seed: int
    previews: int = 0


class DenoiseParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of the stage: the number of denoise steps."""

    steps: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 4
