"""Requests that the trained tiny model has not seen in its training, and their answers. A seed decides everything."""

from __future__ import annotations

import base64
import io
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from dev.training.tiny_omni import tasks
from dev.training.tiny_omni.listening import RATE, Voices
from dev.training.tiny_omni.pictures import picture
from dev.training.tiny_omni.world import VOICES

SEED = 2_000_003
"""Training and its own figures use other seeds."""

DATA = Path(__file__).parents[1] / "data" / "accuracy"
"""Words of the teacher in ways of speaking that are not in the training."""


@dataclass(frozen=True)
class Case:
    """One request.

    Attributes:
        kind: the measured ability: `text`, `say`, `hear`, `repeat` or `see`; `say` and `repeat` answer with sound, too.
        content: the user's message, in the OpenAI form.
        words: the right answer.
        voice: the voice of the answer, if there is sound.
    """

    name: str
    kind: str
    content: Any
    words: tuple[str, ...]
    voice: str | None = None


def cases(each: int) -> list[Case]:
    """Return `each` requests of every kind."""
    random = np.random.default_rng(SEED)
    makers = {"text": _text, "say": _say, "hear": _hear, "repeat": _repeat, "see": _see}
    return [maker(f"{kind}-{number}", random) for number in range(each) for kind, maker in makers.items()]


def _text(name: str, random: np.random.Generator) -> Case:
    request, words = tasks.text_task(random)
    return Case(name, "text", request, tuple(words))


def _say(name: str, random: np.random.Generator) -> Case:
    words = tasks.some_words(random)
    return Case(name, "say", "say " + " ".join(words), tuple(words), _voice(random))


def _hear(name: str, random: np.random.Generator) -> Case:
    words = tasks.some_words(random)
    return Case(name, "hear", _heard(words, random), tuple(words))


def _repeat(name: str, random: np.random.Generator) -> Case:
    words = tasks.some_words(random)
    return Case(name, "repeat", _heard(words, random), tuple(words), _voice(random))


def _see(name: str, random: np.random.Generator) -> Case:
    image, words = picture(random)
    file = io.BytesIO()
    image.save(file, "png")
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{_base64(file)}"}}
    return Case(name, "see", [part, {"type": "text", "text": tasks.SEE}], tuple(words))


@cache
def held_out() -> Voices:
    """Return the words in ways of speaking that are not in the training."""
    sound, rate = soundfile.read(DATA / "held_out.flac", dtype="float32")
    assert rate == RATE
    places = json.loads((DATA / "held_out.json").read_text())
    return Voices({name: sound[start:stop] for name, (start, stop) in places.items()})


def _voice(random: np.random.Generator) -> str:
    return VOICES[random.integers(len(VOICES))]


def _heard(words: list[str], random: np.random.Generator) -> list[dict[str, Any]]:
    file = io.BytesIO()
    soundfile.write(file, held_out().say(words, random)[0], RATE, format="wav", subtype="FLOAT")
    part = {"type": "input_audio", "input_audio": {"data": _base64(file), "format": "wav"}}
    return [part, {"type": "text", "text": tasks.HEAR}]


def _base64(file: io.BytesIO) -> str:
    return base64.b64encode(file.getvalue()).decode()
