"""The core knows no model: names of a model, its stages or its kind of network occur in the core as examples only."""

from __future__ import annotations

import ast
import inspect
import io
import re
import tokenize
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

CORE = Path(__file__).parents[1] / "vllm_omni_ext"

SPOKEN = re.compile(r"talker|thinker|code2wav|qwen|voice|speech", re.IGNORECASE)
PAINTED = re.compile(r"bagel|diffusion|\bdit\b", re.IGNORECASE)

SOUND = ("modalities/audio*", "modalities/sound*", "serving/apis/speech*", "plugins/http.py")
"""Where speech is the subject. A plugin that offers `/v1/audio/speech` reads its bodies, so `plugins/http.py` declares
the API's name and the method."""

EXAMPLES = (
    re.compile(r"\be\.g\. .*?(?=\.\s|\.$|\n\n|\Z)", re.DOTALL),  # to the end of the sentence
    re.compile(r"`[^`]*[\"/.][^`]*`"),  # how something is written: a replica, a side of a stage, JSON
    re.compile(r"(?<=\n\n)    .*?(?=\n\S|\Z)", re.DOTALL),  # an indented block
)
"""Parts of a docstring that show how something looks, without saying that the core knows it."""


@cache
def texts(source: str) -> tuple[tuple[int, str], ...]:
    """Line and text of all that a module consists of; of its docstrings what is not an example."""
    return tuple(_texts(source))


def _texts(source: str) -> Iterator[tuple[int, str]]:
    docstrings = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings[node.value.lineno, node.value.col_offset] = inspect.cleandoc(node.value.value)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        text = docstrings.get(token.start)
        if text is None:
            yield token.start[0], token.string
            continue
        for example in EXAMPLES:
            text = example.sub("", text)
        yield token.start[0], text


def occurrences(words: re.Pattern[str], folder: Path, allowed: tuple[str, ...] = ()) -> list[str]:
    """Where words occur, in file names too: `file:line: text`."""
    found = []
    for file in sorted(folder.rglob("*.py")):
        name = file.relative_to(folder).as_posix()
        if any(fnmatch(name, pattern) for pattern in allowed):
            continue
        if words.search(name):
            found.append(f"{name}: its name")
        for line, text in texts(file.read_text(encoding="utf-8")):
            if words.search(text):
                found.append(f"{name}:{line}: {text.strip()[:80]}")
    return found


def test_words_of_a_speaking_model_are_in_the_modules_about_sound_alone() -> None:
    assert occurrences(SPOKEN, CORE, SOUND) == []


def test_words_of_a_painting_model_are_nowhere() -> None:
    assert occurrences(PAINTED, CORE) == []


def test_every_allowed_place_is_needed() -> None:
    files = [file.relative_to(CORE).as_posix() for file in CORE.rglob("*.py")]
    spoken = {entry.partition(":")[0] for entry in occurrences(SPOKEN, CORE)}
    for pattern in SOUND:
        places = [name for name in files if fnmatch(name, pattern)]
        assert places and spoken & set(places), pattern


@pytest.mark.parametrize(
    "source",
    [
        "talker = 1",
        "x = 'qwen3'",
        "x = f'the {y} Voice'",
        "# the thinker's rows",
        "def speech_of(): ...",
        '"""The thinker comes first, e.g. here. The talker follows."""',
        '"""What `talker` gets."""',
        'def f():\n    """A text.\n\n    Args:\n        voice: a speaker.\n    """',
    ],
)
def test_a_name_is_found(tmp_path: Path, source: str) -> None:
    (tmp_path / "module.py").write_text(source)
    assert len(occurrences(SPOKEN, tmp_path)) == 1


@pytest.mark.parametrize(
    "source",
    [
        '"""A name, e.g. "talker"."""',
        '"""A replica, printed `talker/1`."""',
        '"""A setting: `{"talker": {"replicas": 2}}`."""',
        '"""A plugin.\n\nAn entry point:\n\n    talker = "qwen:FAMILY"\n"""',
    ],
)
def test_an_example_in_a_docstring_is_not(tmp_path: Path, source: str) -> None:
    (tmp_path / "module.py").write_text(source)
    assert occurrences(SPOKEN, tmp_path) == []


def test_a_file_name_counts(tmp_path: Path) -> None:
    (tmp_path / "voices.py").touch()
    assert occurrences(SPOKEN, tmp_path) == ["voices.py: its name"]
