"""Writes the rows of lm-eval's tasks about the tiny model's world: `python -m dev.training.tiny_omni.lm_eval_rows`."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from dev.training.tiny_omni import tasks
from dev.training.tiny_omni.pictures import picture

SEED = 3_000_017
"""Training and the accuracy tests use other seeds."""

ROWS, PICTURES = 48, 24
CHOICES = 4
FOLDER = Path(__file__).parents[1] / "package" / "vllm_omni_ext_tiny" / "lm_eval_tasks"


def text(random: np.random.Generator) -> dict[str, Any]:
    request, words = tasks.text_task(random)
    return {"request": request, "answer": " ".join(words)}


def image(random: np.random.Generator) -> dict[str, Any]:
    drawn, words = picture(random)
    file = io.BytesIO()
    drawn.save(file, "png", optimize=True)
    return {"image": base64.b64encode(file.getvalue()).decode(), "request": tasks.SEE, "answer": " ".join(words)}


def choice(random: np.random.Generator) -> dict[str, Any]:
    """Return a row of a multiple-choice task.

    Its keys are `request`, `choices` (answers with equal numbers of words) and `label` (index of the right answer).
    """
    request, words = tasks.text_task(random)
    choices = {" ".join(words)}
    while len(choices) < CHOICES:
        other = list(words)
        other[random.integers(len(other))] = tasks.some_words(random)[0]
        choices.add(" ".join(other))
    shuffled = [sorted(choices)[i] for i in random.permutation(CHOICES)]
    return {"request": request, "choices": shuffled, "label": shuffled.index(" ".join(words))}


def write(name: str, rows: Iterable[dict[str, Any]]) -> None:
    (FOLDER / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    random = np.random.default_rng(SEED)
    for make, rows in ((text, ROWS), (choice, ROWS), (image, PICTURES)):
        write(make.__name__, (make(random) for _ in range(rows)))


if __name__ == "__main__":
    main()
