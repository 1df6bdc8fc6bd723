"""Suites are read with their files, and mistakes are refused."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
import yaml

from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.evaluation.suite import load

GOOD: dict[str, Any] = {"name": "colours", "items": [{"id": "a", "content": "say red", "expected": "red"}]}


def write(folder: Path, content: Any) -> Path:
    file = folder / "suite.yaml"
    file.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return file


@pytest.mark.parametrize(
    ("kind", "name", "field"),
    [
        ("image_url", "x.png", {"url": "data:image/png;base64,AQI="}),
        ("video_url", "x.mp4", {"url": "data:video/mp4;base64,AQI="}),
        ("input_audio", "x.wav", {"data": "AQI=", "format": "wav"}),
    ],
)
def test_files_of_items_and_conversations_are_read(tmp_path: Path, kind: str, name: str, field: dict[str, str]) -> None:
    (tmp_path / name).write_bytes(base64.b64decode("AQI="))
    content = [{"type": kind, "file": name}, {"type": "text", "text": "What is it?"}]
    message = {"role": "user", "content": content}
    for given in ({"content": content}, {"messages": [message]}):
        suite = load(write(tmp_path, GOOD | {"items": [{"id": "a", "expected": "red"} | given]}))
        assert (suite.threshold, suite.score, suite.options, suite.recogniser) == (0.0, "words", {}, None)
        assert suite.messages(suite.items[0]) == [message | {"content": [{"type": kind, kind: field}, content[1]]}]


def item(**fields: Any) -> dict[str, Any]:
    return {"items": [GOOD["items"][0] | fields]}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("a: [", "while parsing"),
        ({"items": []}, "items: must have one or more"),
        ({"items": GOOD["items"] * 2}, "items: these ids come twice: a"),
        ({"threshold": 2}, "threshold: must be from 0 to 1, got 2"),
        ({"score": "bleu"}, "score"),
        ({"treshold": 1}, "treshold"),
        (item(listen=True), "recogniser: items with `listen` need one"),
        ({"recogniser": "pocketsphinx"}, "vocabulary: pocketsphinx needs the words"),
        (item(content=[{"type": "text", "file": "x"}]), "item 'a': a part with `file` must have the type image_url"),
        (item(content=[{"type": "image_url", "file": "none.png"}]), "item 'a': cannot read .*none.png: No such file"),
        (item(content=None), "item 'a': must have either `content` or `messages`"),
        (item(messages=[{"role": "user", "content": "x"}]), "item 'a': must have either `content` or `messages`"),
        (item(messages=[{"role": "me", "content": "x"}]), "role"),
    ],
)
def test_the_error_names_the_mistake_in_a_suite(tmp_path: Path, wrong: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(write(tmp_path, wrong if isinstance(wrong, str) else GOOD | wrong))


@pytest.mark.parametrize(
    ("name", "problem"), [("latin", r"must be UTF-8: .* at byte 6"), ("none", r"none\.yaml: cannot be read: No such")]
)
def test_a_suite_that_cannot_be_read_is_refused(tmp_path: Path, name: str, problem: str) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"name: \xff")
    with pytest.raises(ConfigError, match=problem):
        load(tmp_path / f"{name}.yaml")


def test_the_digest_changes_with_files_but_not_with_the_threshold(tmp_path: Path) -> None:
    file = tmp_path / "x.wav"
    file.write_bytes(b"one")
    media = item(content=[{"type": "input_audio", "file": "x.wav"}])
    before = load(write(tmp_path, GOOD | media)).digest()
    assert before == load(write(tmp_path, GOOD | media | {"threshold": 0.5})).digest()
    file.write_bytes(b"two")
    assert before != load(write(tmp_path, GOOD | media)).digest()
