"""Prints the share of words of `evaluate.py`'s phrases that recognisers transcribe correctly."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

import numpy as np
import soxr

from dev.training.tiny_omni.judge import Sphinx, Whisper, right_words
from dev.training.tiny_omni.world import RATE, WORDS


def main() -> None:
    """Transcribe a file of phrases, `VOICE/words` -> samples, with each recogniser, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("phrases", type=Path)
    parser.add_argument("--show", type=int, default=0)
    arguments = parser.parse_args()
    phrases = np.load(arguments.phrases)
    for name, judge in (("whisper", Whisper()), ("sphinx", Sphinx(WORDS))):
        said: Counter[str] = Counter()
        right: Counter[str] = Counter()
        for number, key in enumerate(phrases.files):
            words = key.partition("/")[2].split()
            heard = judge.words(soxr.resample(phrases[key], RATE, 16_000))
            said.update(words)
            right.update(word for word, fine in zip(words, right_words(words, heard), strict=True) if fine)
            if number < arguments.show:
                print(" ", key, "->", " ".join(heard))
        missed = {word: f"{said[word] - right[word]}/{said[word]}" for word in said if right[word] < said[word]}
        print(f"{name}: {right.total() / said.total():.3f} of {said.total()} words; missed {missed}", flush=True)


if __name__ == "__main__":
    main()
