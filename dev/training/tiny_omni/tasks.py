"""Random requests in the tiny model's vocabulary with their right replies. All randomness is from the given generator.

A task is a function that returns (text of the request, words of the reply).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dev.training.tiny_omni.world import DIGITS, WEEKDAYS, WORDS

LONGEST = 5
HEAR = "what you hear"
SEE = "what you see"
Task = Callable[[np.random.Generator], tuple[str, list[str]]]


def some_words(random: np.random.Generator, words: Sequence[str] = WORDS, longest: int = LONGEST) -> list[str]:
    """Return one to `longest` random words; a word may occur several times."""
    return [words[i] for i in random.integers(len(words), size=random.integers(1, longest + 1))]


def say(random: np.random.Generator) -> tuple[str, list[str]]:
    """Return "say ..." or "repeat ..." with random words, and these words."""
    words = some_words(random)
    return ("say " if random.random() < 0.7 else "repeat ") + " ".join(words), words


def reverse(random: np.random.Generator) -> tuple[str, list[str]]:
    """Return "reverse ..." with random words, and these words from the last to the first."""
    words = some_words(random)
    return "reverse " + " ".join(words), words[::-1]


def add(random: np.random.Generator) -> tuple[str, list[str]]:
    """Return "add A and B" with two digits whose sum is a digit, and the sum."""
    total = int(random.integers(10))
    first = int(random.integers(total + 1))
    return f"add {DIGITS[first]} and {DIGITS[total - first]}", [DIGITS[total]]


def sort(random: np.random.Generator) -> tuple[str, list[str]]:
    """Return "sort ..." with two to four different digits, and these digits in ascending order."""
    chosen = random.permutation(10)[: random.integers(2, 5)]
    return "sort " + " ".join(DIGITS[i] for i in chosen), [DIGITS[i] for i in sorted(chosen)]


def after(random: np.random.Generator) -> tuple[str, list[str]]:
    """Return "what comes after X" or "what comes before X" for a weekday or a digit X, and the answer."""
    row = (WEEKDAYS, DIGITS)[random.integers(2)]
    step = int(random.choice([-1, 1]))
    wrap = row is WEEKDAYS
    place = int(random.integers(0 if wrap or step > 0 else 1, len(row) if wrap or step < 0 else len(row) - 1))
    return f"what comes {'after' if step > 0 else 'before'} {row[place]}", [row[(place + step) % len(row)]]


TASKS: tuple[Task, ...] = (say, reverse, add, sort, after)


def text_task(random: np.random.Generator) -> tuple[str, list[str]]:
    """Return the request and the reply of a random one of `TASKS`."""
    return TASKS[random.choice(len(TASKS), p=[0.5, 0.15, 0.1, 0.15, 0.1])](random)
