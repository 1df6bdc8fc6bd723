"""Sounds for the audio encoder: words in many ways one after the other, with pauses, noise and another loudness."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

RATE = 16_000
HOP = 160
LONGEST_PAUSE = 0.35
NOISE_DB = (12.0, 40.0)
LOUDNESS_DB = (-10.0, 6.0)


class Voices:
    """Sounds of words at 16 kHz, as `heard.py` writes them: `WORD/NUMBER OF THE WAY` -> samples."""

    def __init__(self, sounds: Mapping[str, np.ndarray]) -> None:
        self._sounds = {(name.split("/")[0], int(name.split("/")[1])): sound for name, sound in sounds.items()}
        self.ways = 1 + max(way for _, way in self._sounds)

    def say(
        self, words: list[str], random: np.random.Generator, way: int | None = None
    ) -> tuple[np.ndarray, list[int]]:
        """Return words in one way of speaking, a random one if none is given, and the sample in each word's middle."""
        chosen = int(random.integers(self.ways)) if way is None else way
        parts, middles = [silence(random)], []
        for word in words:
            sound = self._sounds[word, chosen]
            middles.append(sum(map(len, parts)) + len(sound) // 2)
            parts += [sound, silence(random)]
        return disturbed(np.concatenate(parts), random), middles


def silence(random: np.random.Generator) -> np.ndarray:
    """Return a random pause."""
    return np.zeros(int(random.uniform(0.02, LONGEST_PAUSE) * RATE), np.float32)


def disturbed(sound: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Return the sound with noise and another loudness, padded to whole hops."""
    level = np.sqrt(np.mean(sound**2))
    noise = random.standard_normal(len(sound)) * level * 10 ** (-random.uniform(*NOISE_DB) / 20)
    changed = (sound + noise) * 10 ** (random.uniform(*LOUDNESS_DB) / 20)
    return np.pad(changed, (0, -len(changed) % HOP)).astype(np.float32)


def token_of(sample: int) -> int:
    """Return the index of the embedding that is made of a sample and its neighbours."""
    chunk, rest = divmod(sample // HOP, 100)
    return chunk * 13 + rest // 8


def audio_tokens(mel_frames: int) -> int:
    """Return the number of embeddings that the audio encoder makes of mel frames."""
    rest, chunks = mel_frames % 100, mel_frames // 100
    halves = (rest - 1) // 2 + 1
    return ((halves - 1) // 2 + 1 - 1) // 2 + 1 + chunks * 13
