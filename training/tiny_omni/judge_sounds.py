"""Judges random sequences of single words: `judge_sounds.py DIRECTORY [--length 4] [--count 100]`. Prints words understood.

The directory holds VOICE.npz files of `teacher.py`, or of `decode_words.py` for the words as code2wav says them.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

import numpy as np
import soxr

from training.tiny_omni.judge import Sphinx, Whisper, right_words

FRAME = 1920


def sequence(sounds: dict[str, np.ndarray], words: list[str], pause: int) -> np.ndarray:
    """Return the words' sound at 16 kHz with `pause` silent frames after each, and some silence around."""
    silence = np.zeros(pause * FRAME, np.float32)
    parts = [part for word in words for part in (sounds[word], silence)]
    return soxr.resample(np.concatenate([np.zeros(FRAME * 3, np.float32), *parts]), 24000, 16000)


def main() -> None:
    """Print the share of words that each recogniser understands, and the words that it misses."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--length", type=int, default=4)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--pause", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--drop", nargs="*", default=[])
    parser.add_argument("--judges", nargs="*", default=["whisper", "sphinx"])
    parser.add_argument("--show", type=int, default=0)
    arguments = parser.parse_args()
    random = np.random.default_rng(arguments.seed)
    for path in sorted(arguments.directory.glob("*.npz")):
        sounds = {word: sound for word, sound in np.load(path).items() if word not in arguments.drop}
        world = list(sounds)
        judges = {name: Whisper() if name == "whisper" else Sphinx(world) for name in arguments.judges}
        said: Counter[str] = Counter()
        right = {name: Counter[str]() for name in judges}
        order: list[str] = []
        for turn in range(arguments.count):
            while len(order) < arguments.length:
                order += [world[i] for i in random.permutation(len(world))]
            words, order = order[: arguments.length], order[arguments.length :]
            sound = sequence(sounds, words, arguments.pause)
            said.update(words)
            for name, judge in judges.items():
                heard = judge.words(sound)
                ok = right_words(words, heard)
                right[name].update(w for w, good in zip(words, ok, strict=True) if good)
                if turn < arguments.show:
                    print(name, words, "->", heard)
        for name, counts in right.items():
            missed = {w: f"{said[w] - counts[w]}/{said[w]}" for w in said if counts[w] < said[w]}
            print(f"{path.stem} {name}: {counts.total() / said.total():.3f} of {said.total()}; missed {missed}", flush=True)


if __name__ == "__main__":
    main()
