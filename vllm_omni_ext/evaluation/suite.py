"""Reads suites: YAML files with requests and their expected answers."""

from __future__ import annotations

import base64
import hashlib
import mimetypes
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from vllm_omni_ext.errors import ConfigError

Scorer = Literal["exact", "words", "choice"]
MEDIA = ("image_url", "input_audio", "video_url")
"""Types of content parts that may have `file`, a path, instead of data."""

Content = str | list[dict[str, Any]]


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message of a conversation; for `content` see `Item`."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class Item(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One request, and its expected answer.

    Attributes:
        id: unique in the suite; items of two runs are paired by their ids.
        expected: the expected answer.
        content: content of the user's message in OpenAI's format; a part may have `file`, a path relative to the suite.
        messages: the whole conversation, instead of `content`.
        options: fields of the request's body; they override the suite's `options`.
        score: method of scoring, a key of `scores.SCORERS`; None: `Suite.score`.
        listen: score the recogniser's text of the answer's sound, instead of the answer's text.
    """

    id: str
    expected: str
    content: Content | None = None
    messages: list[Message] = []
    options: dict[str, Any] = {}
    score: Scorer | None = None
    listen: bool = False


class Suite(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of a suite file: requests with expected answers.

    Attributes:
        items: the requests.
        threshold: least mean score at which a server passes.
        score: method of scoring for items without one of their own, a key of `scores.SCORERS`.
        system: a system message before each item's messages.
        options: fields of every request's body; `temperature` is 0 by default.
        recogniser: recogniser for items with `listen`: `whisper` or `pocketsphinx`.
        vocabulary: the words that `pocketsphinx` can recognise.
    """

    name: str
    items: list[Item]
    threshold: float = 0.0
    score: Scorer = "words"
    system: str | None = None
    options: dict[str, Any] = {}
    recogniser: Literal["whisper", "pocketsphinx"] | None = None
    vocabulary: list[str] = []

    def messages(self, item: Item) -> list[dict[str, Any]]:
        """Return the messages of an item's request, with the contents of files.

        Raises:
            OSError: a file cannot be read any more, although `load` could open it.
        """
        return [{"role": each.role, "content": _changed(each.content, _with_data)} for each in self._conversation(item)]

    def digest(self) -> str:
        """Return the SHA-256 of the suite and its media files, without the threshold, as hexadecimal text."""
        found = hashlib.sha256(
            msgspec.json.encode(msgspec.structs.replace(self, threshold=0.0, items=[]), order="sorted")
        )
        for item in self.items:
            without = msgspec.structs.replace(item, content=None, messages=[])
            found.update(msgspec.json.encode(without, order="sorted"))
            for each in self._conversation(item):
                found.update(msgspec.json.encode([each.role, _changed(each.content, _identity)], order="sorted"))
        return found.hexdigest()

    def _conversation(self, item: Item) -> list[Message]:
        first = [] if self.system is None else [Message("system", self.system)]
        return [*first, *(item.messages if item.content is None else [Message("user", item.content)])]


def load(path: Path) -> Suite:
    """Read a suite. Raises ConfigError: the file cannot be read, or a field of it is invalid or missing."""
    try:
        suite = msgspec.convert(yaml.safe_load(path.read_text(encoding="utf-8")), Suite)
    except OSError as err:
        raise ConfigError(f"{path}: cannot be read: {err.strerror}") from None
    except UnicodeDecodeError as err:
        raise ConfigError(f"{path}: must be UTF-8: {err.reason} at byte {err.start}") from None
    except (yaml.YAMLError, msgspec.ValidationError) as err:
        raise ConfigError(f"{path}: {err}") from None
    _check(suite, path)
    return msgspec.structs.replace(suite, items=[_with_files(item, path.parent) for item in suite.items])


def _check(suite: Suite, path: Path) -> None:
    ids = [item.id for item in suite.items]
    if not ids:
        raise ConfigError(f"{path}: items: must have one or more")
    if twice := sorted({each for each in ids if ids.count(each) > 1}):
        raise ConfigError(f"{path}: items: these ids come twice: {', '.join(twice)}")
    for item in suite.items:
        if (item.content is None) == (not item.messages):
            raise ConfigError(f"{path}: item '{item.id}': must have either `content` or `messages`")
    if not 0 <= suite.threshold <= 1:
        raise ConfigError(f"{path}: threshold: must be from 0 to 1, got {suite.threshold:g}")
    if suite.recogniser is None and any(item.listen for item in suite.items):
        raise ConfigError(f"{path}: recogniser: items with `listen` need one; write 'whisper' or 'pocketsphinx'")
    if suite.recogniser == "pocketsphinx" and not suite.vocabulary:
        raise ConfigError(f"{path}: vocabulary: pocketsphinx needs the words between which it chooses")


def _with_files(item: Item, folder: Path) -> Item:
    found = partial(_found, folder=folder, name=item.id)
    messages = [Message(each.role, _changed(each.content, found)) for each in item.messages]
    content = None if item.content is None else _changed(item.content, found)
    return msgspec.structs.replace(item, content=content, messages=messages)


def _changed(content: Content, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Content:
    """Return a message's content in which each part that has `file` is replaced by the result of `change`."""
    return content if isinstance(content, str) else [change(part) if "file" in part else part for part in content]


def _found(part: dict[str, Any], folder: Path, name: str) -> dict[str, Any]:
    """Return a part with its path joined to `folder`. Raises ConfigError: type not in `MEDIA`, or no such file."""
    kind, path = part.get("type"), folder / str(part["file"])
    if kind not in MEDIA:
        raise ConfigError(f"item '{name}': a part with `file` must have the type {', '.join(MEDIA)}, got {kind!r}")
    try:
        path.open("rb").close()
    except OSError as err:
        raise ConfigError(f"item '{name}': cannot read {path}: {err.strerror}") from None
    return part | {"file": str(path)}


def _identity(part: dict[str, Any]) -> dict[str, Any]:
    """Return a part with the SHA-256 of its file instead of the path."""
    with open(part["file"], "rb") as file:
        return part | {"file": hashlib.file_digest(file, "sha256").hexdigest()}


def _with_data(part: dict[str, Any]) -> dict[str, Any]:
    """Return a part in OpenAI's format with the contents of its file in base64."""
    kind, path = part["type"], Path(part["file"])
    data = base64.b64encode(path.read_bytes()).decode()
    if kind == "input_audio":
        return {"type": kind, kind: {"data": data, "format": path.suffix.removeprefix(".")}}
    media = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    return {"type": kind, kind: {"url": f"data:{media};base64,{data}"}}
