"""Names of a model, its stages or its kind of network occur in the core as examples only."""

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

SOUND = (
    "modalities/audio*",
    "modalities/sound*",
    "serving/speech*",
    "serving/realtime/*",
    "loadtest/*",
    "cli/bench*",
    "batch/lines.py",
    "plugins/http.py",
)
"""Where speech is the subject. A plugin that offers `/v1/audio/speech` reads its bodies, so `plugins/http.py` declares
the API's name and the method; `batch/lines.py` has the routes of all APIs."""

EXAMPLES = (
    re.compile(r"\be\.g\. .*?(?=\.\s|\.$|\n\n|\Z)", re.DOTALL),  # to the end of the sentence
    re.compile(r"`[^`]*[\"/.][^`]*`"),  # how something is written: a replica, a side of a stage, JSON
    re.compile(r"(?<=\n\n)    .*?(?=\n\S|\Z)", re.DOTALL),  # an indented block
)
"""Parts of a docstring that are examples."""


@cache
def texts(source: str) -> tuple[tuple[int, str], ...]:
    """Line and text of each token of a module; docstrings without their examples."""
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


@pytest.mark.slow
def test_the_core_has_no_words_of_a_model_outside_the_modules_about_sound() -> None:
    assert occurrences(SPOKEN, CORE, SOUND) == []
    assert occurrences(PAINTED, CORE) == []
    names = {entry.partition(":")[0] for entry in occurrences(SPOKEN, CORE)}
    assert all(any(fnmatch(name, pattern) for name in names) for pattern in SOUND), "each exception is needed"


def test_a_name_is_found_everywhere_but_in_an_example_of_a_docstring(tmp_path: Path) -> None:
    (tmp_path / "voices.py").touch()
    assert occurrences(SPOKEN, tmp_path) == ["voices.py: its name"]
    (tmp_path / "voices.py").rename(tmp_path / "module.py")
    for source, count in (
        ("talker = 1", 1),
        ("x = f'the {y} Voice'", 1),
        ("# the thinker's rows", 1),
        ("def speech_of(): ...", 1),
        ('"""The thinker comes first, e.g. here. The talker follows."""', 1),
        ('def f():\n    """A text.\n\n    Args:\n        voice: a speaker.\n    """', 1),
        ('"""A name, e.g. "talker"."""', 0),
        ('"""A replica, printed `talker/1`."""', 0),
        ('"""A plugin.\n\nAn entry point:\n\n    talker = "qwen:FAMILY"\n"""', 0),
    ):
        (tmp_path / "module.py").write_text(source)
        assert len(occurrences(SPOKEN, tmp_path)) == count, source
