"""Pieces of an answer that are not text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, kw_only=True)
class AudioOutput:
    """A piece of sound.

    Attributes:
        request_id: the caller's request id.
        samples: float32 [samples] in [-1, 1], mono.
        sample_rate: Hz.
        frames: codec frames spoken so far, int64 [frames, code groups].
        finished: no more sound follows.
        note: why there is no sound, if there is none.
    """

    request_id: str
    samples: np.ndarray[Any, Any]
    sample_rate: int
    frames: np.ndarray[Any, Any]
    finished: bool
    note: str | None = None
