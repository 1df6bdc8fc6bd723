"""Messages of the flow to the voicebox. Pure."""

from __future__ import annotations

from typing import Annotated

import msgspec

SAMPLE_RATE = 16000
TONE = 320
"""Samples of one token: 20 ms."""


class Tones(msgspec.Struct, frozen=True, kw_only=True, tag="tones"):
    """The sound of a part's tokens: `pitch` is a factor of all frequencies."""

    pitch: float = 1.0


class ToneParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of the stage: the loudness, from 0 to 1."""

    volume: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.5
