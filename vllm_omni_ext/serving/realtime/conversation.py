"""Keeps the items of a conversation in order, and converts them to chat messages for the model."""

from __future__ import annotations

import base64
import json
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_omni_ext.serving.realtime.events import (
    MISSING,
    UNKNOWN,
    WRONG_VALUE,
    AssistantContent,
    AssistantMessage,
    ClientError,
    FunctionCall,
    FunctionCallOutput,
    Strict,
    SystemMessage,
    UserContent,
    UserMessage,
    unsupported,
)
from vllm_omni_ext.serving.realtime.limits import Limits
from vllm_omni_ext.serving.realtime.settings import Settings
from vllm_omni_ext.serving.realtime.sound import SHORTEST_MS, Sound, decoded

ROOT = "root"
DATA_URI = "data:image/"

MOST_WEIGHT_PER_S = 20
"""Largest number of letters that are spoken in a second."""
WIDE = 3
"""Number of letters as which a wide character (Chinese, Japanese, Korean) is counted."""

COMPLETED, INCOMPLETE, IN_PROGRESS = "completed", "incomplete", "in_progress"


@dataclass(kw_only=True)
class Part:
    """A content part of a message.

    Attributes:
        type: e.g. "input_audio".
        text: the text, or the transcript of the sound; None: there is no transcript.
        sound: the user's sound.
        image_url: the user's picture as a data URI.
        made_ms: length of the assistant's sound that the model has generated, in ms.
        sent_ms: length of the assistant's sound that was sent to the client, in ms.
        heard_ms: length of the assistant's sound that the client has played, in ms; None: all of it.
        whole: the model has generated all sound for the transcript.
    """

    type: str
    text: str | None = None
    sound: Sound | None = None
    image_url: str | None = None
    made_ms: float = 0.0
    sent_ms: float = 0.0
    heard_ms: float | None = None
    whole: bool = False

    @property
    def spoken(self) -> bool:
        """Whether the part is sound of the assistant."""
        return self.type == "output_audio"

    def heard(self) -> str:
        """Return the text. If sound was not played to its end, return only the transcript of the played sound."""
        text = self.text or ""
        if not self.spoken or self.heard_ms is None:
            return text
        return cut(text, self.heard_ms, self.made_ms, whole=self.whole)

    def public(self, *, audio: bool) -> dict[str, Any]:
        """Return the part in the format of the API; with `audio=True` it contains the user's sound."""
        shown: dict[str, Any] = {"type": self.type}
        if self.type in ("input_audio", "output_audio"):
            shown["transcript"] = self.heard() if self.spoken else self.text
        elif self.type == "input_image":
            shown["image_url"] = self.image_url
        else:
            shown["text"] = self.text
        if audio and self.sound is not None:
            shown["audio"] = base64.b64encode(self.sound.data).decode("ascii")
        return shown


def cut(text: str, heard_ms: float, made_ms: float, *, whole: bool) -> str:
    """Return the beginning of a transcript for the sound that was played. It ends with a whole word.

    The returned fraction of the text equals the played fraction of the sound. The model writes text before its sound:
    while sound is missing, at most `MOST_WEIGHT_PER_S` letters per second of played sound are returned.

    Args:
        heard_ms: length of the played sound, in ms.
        made_ms: length of the sound that has been generated for the text, in ms.
        whole: all sound for the text has been generated; a text that a client has created has no sound.
    """
    if whole and made_ms and heard_ms >= made_ms:
        return text
    weights = [WIDE if unicodedata.east_asian_width(each) in "WF" else 1 for each in text]
    budget = sum(weights) * heard_ms / made_ms if made_ms else 0.0
    if not whole:
        budget = min(budget, MOST_WEIGHT_PER_S * heard_ms / 1000)
    end = 0
    while end < len(text) and budget >= weights[end]:
        budget -= weights[end]
        end += 1
    if end < len(text) and weights[end] == 1 and text[end].isalnum() and end and text[end - 1].isalnum():
        end = max(text.rfind(" ", 0, end), 0)
    return text[:end].rstrip()


@dataclass(kw_only=True)
class Item:
    """An item of a conversation: a message, a function call, or a function's output.

    Attributes:
        type: "message", "function_call" or "function_call_output".
        role, content: of a message; empty for other types.
        name, call_id, arguments, output: of a function call or a function's output; empty where the type lacks them.
        status: "completed", "incomplete" or "in_progress".
    """

    id: str
    type: str
    role: str = ""
    status: str = COMPLETED
    content: list[Part] = field(default_factory=list)
    name: str = ""
    call_id: str = ""
    arguments: str = ""
    output: str = ""

    def public(self, *, audio: bool = False) -> dict[str, Any]:
        """Return the item in the format of the API; with `audio=True` it contains the user's sound."""
        shown: dict[str, Any] = {
            "id": self.id,
            "object": "realtime.item",
            "type": self.type,
            "status": self.status,
        }
        if self.type == "message":
            return shown | {"role": self.role, "content": [part.public(audio=audio) for part in self.content]}
        if self.type == "function_call":
            return shown | {"name": self.name, "call_id": self.call_id, "arguments": self.arguments}
        return shown | {"call_id": self.call_id, "output": self.output}

    def sound_bytes(self) -> int:
        """Return the number of bytes of the item's sound."""
        return sum(len(part.sound.data) for part in self.content if part.sound is not None)

    def text_bytes(self) -> int:
        """Return the number of characters of the item's texts and data URIs."""
        parts = sum(len(part.text or "") + len(part.image_url or "") for part in self.content)
        return parts + len(self.arguments) + len(self.output) + len(self.name)


def make_item(given: Strict, settings: Settings, new_id: Callable[[str], str], path: str) -> Item:
    """Return a conversation item for an item in a client's event.

    Args:
        given: the item in the event.
        path: path of the item in the event, for errors.

    Raises:
        ClientError: a content part is invalid or not supported.
    """
    item_id = getattr(given, "id", None) or new_id("item")
    if isinstance(given, FunctionCall):
        whole = given.status != INCOMPLETE  # a call that was cut off may be restored; prompts omit it
        if whole and not is_json_object(given.arguments):
            raise ClientError(f"{path}.arguments: must be a JSON object", code=WRONG_VALUE, param=f"{path}.arguments")
        return Item(
            id=item_id,
            type="function_call",
            status=COMPLETED if whole else INCOMPLETE,
            name=given.name,
            call_id=given.call_id or new_id("call"),
            arguments=given.arguments,
        )
    if isinstance(given, FunctionCallOutput):
        return Item(id=item_id, type="function_call_output", call_id=given.call_id, output=given.output)
    if isinstance(given, SystemMessage):
        parts = [Part(type=each.type, text=each.text) for each in given.content]
        return Item(id=item_id, type="message", role="system", content=parts)
    if isinstance(given, AssistantMessage):
        parts = [_assistant_part(each, f"{path}.content[{at}]") for at, each in enumerate(given.content)]
        return Item(id=item_id, type="message", role="assistant", content=parts)
    assert isinstance(given, UserMessage)
    sound_format = settings["audio"]["input"]["format"]
    parts = [_user_part(each, sound_format, f"{path}.content[{at}]") for at, each in enumerate(given.content)]
    return Item(id=item_id, type="message", role="user", content=parts)


def is_json_object(text: str) -> bool:
    """Return whether a text is a JSON object. Chat templates require a JSON object as arguments of a function call."""
    return isinstance(_json(text), dict)


def is_json(text: str) -> bool:
    """Return whether a text is JSON."""
    return _json(text) is not _NOTHING


_NOTHING = object()


def _json(text: str) -> Any:
    """Return the value of a JSON text; `_NOTHING` if the text is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return _NOTHING


def _user_part(given: UserContent, sound_format: dict[str, Any], path: str) -> Part:
    own = {"input_text": ("text",), "input_audio": ("audio", "transcript"), "input_image": ("image_url", "detail")}
    _only(given, own[given.type], path)
    if given.type == "input_text":
        return Part(type=given.type, text=given.text)
    if given.type == "input_audio":
        assert given.audio is not None
        sound = Sound(data=decoded(given.audio, sound_format, f"{path}.audio"), format=sound_format)
        if sound.ms < SHORTEST_MS:
            param = f"{path}.audio"
            raise ClientError(f"{param}: must have {SHORTEST_MS} ms or more", code=WRONG_VALUE, param=param)
        return Part(type=given.type, text=given.transcript, sound=sound)
    assert given.image_url is not None
    if not given.image_url.startswith(DATA_URI):
        param = f"{path}.image_url"
        raise ClientError(f"{param}: must be a data URI of a picture", code=WRONG_VALUE, param=param)
    if given.detail not in (None, "auto"):
        raise unsupported(f"{path}.detail", "the model takes pictures as they are; leave it out")
    return Part(type=given.type, image_url=given.image_url)


def _assistant_part(given: AssistantContent, path: str) -> Part:
    if given.audio is not None:
        raise unsupported(f"{path}.audio", "earlier sound of the assistant is read as its transcript")
    needed = "text" if given.type == "output_text" else "transcript"
    _only(given, (needed,), path)
    return Part(type=given.type, text=getattr(given, needed), whole=True)


def _only(given: Any, names: Sequence[str], path: str) -> None:
    """Raise ClientError if a part does not have the field `names[0]`, or has a field that is not in `names`."""
    if getattr(given, names[0]) is None:
        raise ClientError(f"{path}.{names[0]}: is missing", code=MISSING, param=f"{path}.{names[0]}")
    for name in given.model_fields_set - {"type", *names}:
        if getattr(given, name) is not None:
            raise ClientError(f"{path}.{name}: does not belong to {given.type}", code=UNKNOWN, param=f"{path}.{name}")


def check_size(items: Sequence[Item], limits: Limits) -> None:
    """Check the number and the size of the items of a conversation, or of the input of a response.

    Raises:
        ClientError: the items exceed a limit.
    """
    full = [
        (len(items), limits.items, "items"),
        (sum(len(each.content) for each in items), limits.parts, "content parts"),
        (sum(each.sound_bytes() for each in items), limits.sound_bytes, "bytes of sound"),
        (sum(each.text_bytes() for each in items), limits.text_bytes, "characters"),
    ]
    for found, most, unit in full:
        if found > most:
            raise ClientError(f"the conversation may have {most} {unit}; delete items", code="conversation_too_large")


class Conversation:
    """The items of a conversation, in order, with limits of their number and size."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._items: list[Item] = []

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items)

    def __contains__(self, item: Item) -> bool:
        return any(each is item for each in self._items)

    def __len__(self) -> int:
        return len(self._items)

    def find(self, item_id: str, path: str = "item_id") -> Item:
        """Return the item of the conversation that has the id `item_id`.

        Args:
            path: path of the id in the client's event, for the error.

        Raises:
            ClientError: no item has this id.
        """
        for item in self._items:
            if item.id == item_id:
                return item
        raise ClientError(f"{path}: the conversation has no item '{item_id:.100}'", code="item_not_found", param=path)

    def before(self, item: Item) -> str | None:
        """Return the id of the item that precedes `item`; None: `item` is the first."""
        at = self._index(item)
        return self._items[at - 1].id if at else None

    def check(self, item: Item) -> None:
        """Check that an item can be added.

        Raises:
            ClientError: another item has its id, or the conversation would exceed a limit.
        """
        if any(each.id == item.id for each in self._items):
            raise ClientError(
                f"item.id: the conversation has an item '{item.id}'", code="item_already_exists", param="item.id"
            )
        check_size([*self, item], self._limits)

    def check_room(self) -> None:
        """Check that the conversation has room for an output item. The size of the item is not known yet.

        Raises:
            ClientError: the conversation is full.
        """
        check_size([*self, Item(id="", type="message")], self._limits)

    def add(self, item: Item, previous_item_id: str | None = None) -> str | None:
        """Add an item, and return the id of the item that precedes it; None: the added item is the first.

        Args:
            previous_item_id: id of the item after which `item` is added; "root": add it as first item; None: as last.

        Raises:
            ClientError: no item has the id `previous_item_id`, or `check` raises.
        """
        self.check(item)
        at = len(self._items)
        if previous_item_id == ROOT:
            at = 0
        elif previous_item_id is not None:
            at = self._index(self.find(previous_item_id, "previous_item_id")) + 1
        self._items.insert(at, item)
        return self.before(item)

    def append_output(self, item: Item) -> str | None:
        """Append an item that the model generates, without a check of limits; return the id of the preceding item."""
        self._items.append(item)
        return self.before(item)

    def delete(self, item: Item) -> None:
        """Remove an item from the conversation."""
        del self._items[self._index(item)]

    def _index(self, item: Item) -> int:
        return next(at for at, each in enumerate(self._items) if each is item)


def messages(instructions: str, items: Iterable[Item]) -> list[dict[str, Any]]:
    """Return the items as chat messages. The value of `input_audio` in a content part is the `Sound` object.

    Consecutive function calls, and the assistant's text before them, become one message. Function calls that are not
    complete, because their response has ended, are omitted.
    """
    found: list[dict[str, Any]] = []
    if instructions:
        found.append({"role": "system", "content": instructions})
    for item in items:
        if item.type == "function_call":
            if item.status != COMPLETED:
                continue
            call = {
                "id": item.call_id,
                "type": "function",
                "function": {"name": item.name, "arguments": item.arguments},
            }
            if not found or found[-1]["role"] != "assistant":
                found.append({"role": "assistant", "content": None})
            found[-1].setdefault("tool_calls", []).append(call)
        elif item.type == "function_call_output":
            found.append({"role": "tool", "tool_call_id": item.call_id, "content": item.output})
        elif item.role == "user":
            parts = [_user_message_part(part) for part in item.content]
            if parts:
                found.append({"role": "user", "content": parts})
        elif text := "".join(part.heard() for part in item.content):
            found.append({"role": item.role, "content": text})
    return found


def _user_message_part(part: Part) -> dict[str, Any]:
    if part.sound is not None:
        return {"type": "input_audio", "input_audio": part.sound}
    if part.image_url is not None:
        return {"type": "image_url", "image_url": {"url": part.image_url}}
    return {"type": "text", "text": part.text}
