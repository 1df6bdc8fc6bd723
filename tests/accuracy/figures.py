"""How many words of the answers are right: of the text, and as two recognisers understand the sound."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import soxr

from dev.training.tiny_omni.judge import RATE, Sphinx, Whisper, right_words
from dev.training.tiny_omni.world import RATE as SOUND_RATE
from dev.training.tiny_omni.world import VOICES, WORDS
from tests.accuracy.answers import Answer
from tests.accuracy.cases import Case

PITCH_HZ = dict(zip(VOICES, (200.0, 100.0), strict=True))
"""The pitch of each voice, which the teacher keeps the whole time."""
PITCH_WINDOW = 2048

LEAST = {
    "text: text": 0.95,
    "say: text": 0.98,
    "hear: text": 0.95,
    "repeat: text": 0.95,
    "see: text": 0.95,
    "say: whisper": 0.95,
    "repeat: whisper": 0.9,
    "say: pocketsphinx": 0.9,
    "repeat: pocketsphinx": 0.85,
    "voice": 1.0,
}
"""Shares of right words. A small share of wrong ones is a larger one among the few cases of the usual run."""

MANY = 30
LEAST_OF_MANY = LEAST | {"text: text": 0.98, "hear: text": 0.97, "repeat: text": 0.97, "see: text": 0.98}
"""The same where at least `MANY` requests of each kind were sent."""

Recogniser = Callable[[np.ndarray], Sequence[str]]


def too_low(found: Mapping[str, float], cases: Sequence[Case]) -> dict[str, float]:
    """Return the figures of these cases that are below their least values."""
    requests = max(Counter(case.kind for case in cases).values())
    least = LEAST if requests < MANY else LEAST_OF_MANY
    return {name: value for name, value in found.items() if value < least[name]}


def recognisers() -> dict[str, Recogniser]:
    """Return the recognisers of speech at 16 kHz, by name."""
    return {"whisper": Whisper().words, "pocketsphinx": Sphinx(WORDS).words}


def figures(cases: Sequence[Case], answers: Mapping[str, Answer], judges: Mapping[str, Recogniser]) -> dict[str, float]:
    """Return shares of right words: of the text of each kind, of the sound by each judge, and of voices."""
    found: dict[str, list[bool]] = {}
    for case in cases:
        answer = answers[case.name]
        found.setdefault(f"{case.kind}: text", []).extend(right_words(case.words, answer.text.split()))
        if case.voice is None:
            continue
        found.setdefault("voice", []).append(voice_of(answer.sound) == case.voice)
        sound = soxr.resample(answer.sound / np.float32(32768), SOUND_RATE, RATE)
        for name, judge in judges.items():
            found.setdefault(f"{case.kind}: {name}", []).extend(right_words(case.words, judge(sound)))
    return {name: float(np.mean(right)) for name, right in found.items()}


def voice_of(sound: np.ndarray) -> str | None:
    """Return the voice whose pitch most windows of a sound have; None: there is no sound."""
    padded = np.pad(sound.astype(np.float64), (0, max(0, PITCH_WINDOW - len(sound))))
    windows = np.lib.stride_tricks.sliding_window_view(padded, PITCH_WINDOW)[:: PITCH_WINDOW // 2]
    loud = windows[np.abs(windows).max(axis=1) > 1000]
    if len(sound) < PITCH_WINDOW or not len(loud):
        return None
    spectra = np.abs(np.fft.rfft(loud * np.hanning(PITCH_WINDOW), 4 * PITCH_WINDOW)) ** 2
    correlation = np.fft.irfft(spectra).mean(axis=0)
    # Both pitches repeat after the longer period; the shorter one repeats at its half, too.
    long, short = (round(SOUND_RATE / PITCH_HZ[voice]) for voice in ("ethan", "chelsie"))
    return "chelsie" if correlation[short] > 0.9 * correlation[long] else "ethan"
