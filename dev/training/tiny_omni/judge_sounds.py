"""Transcribes random sequences of single words with recognisers, and prints the share of right words.

The directory contains VOICE.npz files of `teacher.py`, or those of `vocoder.py` with the words' sounds from code2wav.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

import numpy as np
import soxr

from dev.training.tiny_omni.judge import Sphinx, Whisper, right_words
from dev.training.tiny_omni.world import FRAME, PAUSE


def sequence(sounds: dict[str, np.ndarray], words: list[str], pause: int) -> np.ndarray:
    """Join the sounds of words, with `pause` silent frames after each word; return samples at 16 kHz.

    Args:
        sounds: word -> samples at 24 kHz.
    """
    silence = np.zeros(pause * FRAME, np.float32)
    parts = [part for word in words for part in (sounds[word], silence)]
    return soxr.resample(np.concatenate([np.zeros(FRAME * 3, np.float32), *parts]), 24000, 16000)


def orders(world: list[str], length: int, count: int, random: np.random.Generator) -> list[list[str]]:
    """Return `count` random sequences of `length` words, in which all words are about equally frequent."""
    stock: list[str] = []
    while len(stock) < length * count:
        stock += [world[i] for i in random.permutation(len(world))]
    return [stock[first : first + length] for first in range(0, length * count, length)]


def judge_voice(sounds: dict[str, np.ndarray], arguments: argparse.Namespace) -> None:
    """Print the share of words that each recogniser transcribes correctly, and the words that it misses."""
    phrases = orders(list(sounds), arguments.length, arguments.count, np.random.default_rng(arguments.seed))
    said = Counter(word for words in phrases for word in words)
    for name in arguments.judges:
        judge = Whisper() if name == "whisper" else Sphinx(list(sounds))
        right: Counter[str] = Counter()
        for number, words in enumerate(phrases):
            heard = judge.words(sequence(sounds, words, arguments.pause))
            good = right_words(words, heard)
            right.update(word for word, fine in zip(words, good, strict=True) if fine)
            if number < arguments.show:
                print(" ", words, "->", heard)
        missed = {word: f"{said[word] - right[word]}/{said[word]}" for word in said if right[word] < said[word]}
        print(f"  {name}: {right.total() / said.total():.3f} of {said.total()} words; missed {missed}", flush=True)


def main() -> None:
    """Print the results for each voice, i.e. each `*.npz` file, of a directory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--length", type=int, default=4)
    parser.add_argument("--count", type=int, default=44)
    parser.add_argument("--pause", type=int, default=PAUSE)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--judges", nargs="*", default=["whisper", "sphinx"])
    parser.add_argument("--show", type=int, default=0)
    arguments = parser.parse_args()
    for path in sorted(arguments.directory.glob("*.npz")):
        print(path.stem)
        judge_voice(dict(np.load(path)), arguments)


if __name__ == "__main__":
    main()
