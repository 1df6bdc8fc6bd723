"""Synthesises every word alone in two voices: the sound that the tiny model learns. Needs the package hibari-tts.

Both voices are monotone, and a frame of 1920 samples is a whole number of pitch periods. The harmonics of every frame
have the same phases, so code2wav only has to learn the change of spectra. `chelsie` is the teacher's own voice at
200 Hz; `ethan` has the pitch 100 Hz and formants lowered by `FORMANTS`, as of a longer vocal tract.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dev.training.tiny_omni.world import FRAME, RATE, WORDS

PITCH = {"chelsie": 200.0, "ethan": 100.0}
FORMANTS = {"chelsie": 1.0, "ethan": 0.87}
SPEED = 1.0
VOICED = 40
"""Hz. The synthesiser returns a pitch below this for unvoiced sound."""
LOUDNESS = 0.12
"""Root mean square of the loudest tenth of a second of each word, relative to full scale 1 (before `PEAK`)."""
PEAK = 0.9
ONSET = 0.02
"""A word starts and ends where its loudness is this share of its largest loudness."""


def warp(spectrum: np.ndarray, factor: float) -> np.ndarray:
    """Return a log spectrum [bins, frames] whose frequency axis is stretched by `factor`."""
    bins = np.arange(len(spectrum))
    source = np.minimum(bins / factor, len(spectrum) - 1)
    low = source.astype(int)
    high = np.minimum(low + 1, len(spectrum) - 1)
    part = (source - low)[:, None].astype(np.float32)
    return spectrum[low] * (1 - part) + spectrum[high] * part


def loudness(sound: np.ndarray, width: int) -> np.ndarray:
    """Return the root mean square of the `width` samples around each sample."""
    return np.sqrt(np.convolve(sound**2, np.ones(width) / width, mode="same"))


def trim(sound: np.ndarray, period: int) -> np.ndarray:
    """Cut the silence around a word at whole pitch periods, set the loudness, and pad the last frame."""
    level = loudness(sound, RATE // 100)
    loud = np.flatnonzero(level > ONSET * level.max())
    start = max(0, loud[0] - RATE // 100) // period * period
    stop = min(len(sound), loud[-1] + RATE // 50)
    word = sound[start:stop] * (LOUDNESS / loudness(sound, RATE // 10).max())
    word *= min(1.0, PEAK / np.abs(word).max())
    fade = min(240, len(word))
    word[-fade:] *= np.linspace(1, 0, fade)
    return np.pad(word, (0, -len(word) % FRAME)).astype(np.float32)


class Teacher:
    """The speech synthesiser hibari, with stated formants and pitch."""

    def __init__(self) -> None:
        from hibari import Hibari, dsp

        self._hibari, self._dsp = Hibari(), dsp

    def say(self, word: str, voice: str) -> np.ndarray:
        """Return the samples of a word in a voice of the model (`VOICES`), at 24 kHz, a whole number of frames."""
        return self.render(word, formants=FORMANTS[voice], pitch=PITCH[voice], speed=SPEED, seed=0)

    def render(self, word: str, *, formants: float, pitch: float, speed: float, seed: int) -> np.ndarray:
        """Return the samples of a word at 24 kHz; equal arguments give equal samples.

        Args:
            formants: factor for the frequencies of the formants.
            pitch: Hz, or 0 for the synthesiser's own melody.
            speed: factor; 1 is the synthesiser's usual speed.
            seed: of the noise in the sound.
        """
        ids = self._hibari.ids(self._hibari.phonemize(word.capitalize() + ".")[0])
        feed = {"ids": np.asarray([ids], np.int64), "speed": np.asarray([speed], np.float32)}
        tone, turn, noise, rest, phase, f0 = (out[0] for out in self._hibari.sess.run(None, feed))
        tone, turn, noise, rest = (warp(part, formants) for part in (tone, turn, noise, rest))
        melody = np.where(f0 > VOICED, pitch, 0).astype(np.float32) if pitch else f0
        sound = self._dsp.synth(tone, turn, noise, rest, phase, melody, np.random.default_rng(seed))
        return trim(sound, round(RATE / pitch) if pitch else 1)


def write_sounds(words: Sequence[str], directory: Path) -> None:
    """Write VOICE.npz for each voice: word -> samples."""
    teacher = Teacher()
    directory.mkdir(parents=True, exist_ok=True)
    for voice in PITCH:
        np.savez(directory / f"{voice}.npz", **{word: teacher.say(word, voice) for word in words})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    write_sounds(WORDS, arguments.directory)
