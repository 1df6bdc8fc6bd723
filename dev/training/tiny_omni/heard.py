"""Synthesises every word in many ways, at 16 kHz: training data of the audio encoder, and held-out data for its test.

A way is (factor of the formants' frequencies, pitch in Hz or 0 for the synthesiser's own melody, speed, seed). Needs
hibari-tts and soxr.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import soxr

from dev.training.tiny_omni.teacher import Teacher
from dev.training.tiny_omni.world import RATE, WORDS

TRAINING = [
    (1.0, 200.0, 1.0, 0),
    (0.87, 100.0, 1.0, 0),
    (1.0, 0.0, 1.0, 1),
    (1.0, 0.0, 0.85, 2),
    (1.0, 0.0, 1.2, 3),
    (0.87, 110.0, 0.85, 4),
    (0.87, 90.0, 1.2, 5),
    (0.80, 120.0, 1.0, 6),
    (1.08, 230.0, 1.1, 7),
    (0.95, 160.0, 0.9, 8),
]
HELD_OUT = [(1.0, 0.0, 1.1, 11), (0.92, 140.0, 1.0, 12), (1.04, 210.0, 0.92, 13)]
"""Ways that differ from all in `TRAINING`: in speed, in voice (formants and pitch), and in both."""


def write_heard(words: Sequence[str], directory: Path) -> None:
    """Write training.npz and held_out.npz: `WORD/NUMBER OF THE WAY` -> samples at 16 kHz."""
    teacher = Teacher()
    directory.mkdir(parents=True, exist_ok=True)
    for name, ways in (("training", TRAINING), ("held_out", HELD_OUT)):
        sounds = {}
        for number, (formants, pitch, speed, seed) in enumerate(ways):
            for word in words:
                sound = teacher.render(word, formants=formants, pitch=pitch, speed=speed, seed=seed)
                sounds[f"{word}/{number}"] = soxr.resample(sound, RATE, 16_000).astype(np.float32)
        np.savez(directory / f"{name}.npz", **sounds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    write_heard(WORDS, arguments.directory)
