"""Sentences of a synthesiser, with pauses at known places."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

RATE = 16_000
SENTENCES = (
    "The sky is blue because sunlight is scattered by the air.",
    "Please turn left at the next traffic light.",
    "Seven red apples cost four dollars.",
)
LOUD = 0.02
"""Amplitude from which a sample counts as part of a sentence, of a sound whose loudest sample is near 0.3."""


@cache
def _synthesiser() -> Any:
    from hibari import Hibari

    return Hibari()


@cache
def sentence(text: str) -> np.ndarray:
    """float32 [n] at 16 kHz, without silence before and after; the same samples at each call."""
    import soxr

    sound = soxr.resample(np.asarray(_synthesiser()(text, seed=0), np.float32), 24_000, RATE)
    loud = np.flatnonzero(np.abs(sound) > LOUD)
    return sound[loud[0] : loud[-1] + 1]


def with_pauses(sentences: Sequence[np.ndarray], pauses_s: Sequence[float]) -> tuple[np.ndarray, list[tuple]]:
    """Sentences with a pause before, between and after them; the sound, and begin and end of each sentence in ms."""
    parts, places, at = [], [], 0
    for pause, each in zip(pauses_s, [*sentences, None], strict=True):
        parts.append(np.zeros(round(pause * RATE), np.float32))
        at += len(parts[-1])
        if each is not None:
            places.append((1e3 * at / RATE, 1e3 * (at + len(each)) / RATE))
            parts.append(each)
            at += len(each)
    return np.concatenate(parts), places
