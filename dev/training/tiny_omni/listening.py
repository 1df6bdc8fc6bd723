"""Sounds for the audio encoder: several words one after the other, with random pauses, noise and loudness."""

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
        """Join the sounds of words, with random pauses, noise and loudness.

        Args:
            way: number of the way of speaking; None: a random one.

        Returns:
            (samples at 16 kHz, index of the sample in the middle of each word).
        """
        chosen = int(random.integers(self.ways)) if way is None else way
        parts, middles = [silence(random)], []
        for word in words:
            sound = self._sounds[word, chosen]
            middles.append(sum(map(len, parts)) + len(sound) // 2)
            parts += [sound, silence(random)]
        return disturbed(np.concatenate(parts), random), middles


def silence(random: np.random.Generator) -> np.ndarray:
    """Return silent samples of a random length, up to `LONGEST_PAUSE` seconds."""
    return np.zeros(int(random.uniform(0.02, LONGEST_PAUSE) * RATE), np.float32)


def disturbed(sound: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Return the sound with random noise and loudness, padded to a multiple of `HOP` samples."""
    level = np.sqrt(np.mean(sound**2))
    noise = random.standard_normal(len(sound)) * level * 10 ** (-random.uniform(*NOISE_DB) / 20)
    changed = (sound + noise) * 10 ** (random.uniform(*LOUDNESS_DB) / 20)
    return np.pad(changed, (0, -len(changed) % HOP)).astype(np.float32)


def token_of(sample: int) -> int:
    """Return the index of the audio encoder's embedding that covers a sample."""
    chunk, rest = divmod(sample // HOP, 100)
    return chunk * 13 + rest // 8


def audio_tokens(mel_frames: int) -> int:
    """Return the number of embeddings that the audio encoder makes of mel frames."""
    rest, chunks = mel_frames % 100, mel_frames // 100
    halves = (rest - 1) // 2 + 1
    return ((halves - 1) // 2 + 1 - 1) // 2 + 1 + chunks * 13
