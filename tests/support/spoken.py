"""Sentences of two synthesisers, with pauses at known places."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

RATE = 16_000
SENTENCES = (
    "The sky is blue because sunlight is scattered by the air.",
    "Please turn left at the next traffic light.",
    "Seven red apples cost four dollars.",
)
ESPEAK = Path(__file__).parents[1] / "data" / "realtime" / "espeak.flac"
"""`SENTENCES` by espeak-ng (espeakng-loader 0.2.4, voice en-us), without pauses, at `RATE`."""
ESPEAK_ENDS = (45378, 82623, 113521)

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


def of_espeak() -> list[np.ndarray]:
    """`SENTENCES` by a synthesiser of formants: float32 [n] at 16 kHz each."""
    sound, _ = soundfile.read(ESPEAK, dtype="float32")
    return np.split(sound, ESPEAK_ENDS[:-1])


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
