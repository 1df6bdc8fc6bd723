"""Sessions of the Realtime protocol without sockets, and checks of their events."""

from __future__ import annotations

import base64
import json
from collections import Counter
from typing import Any, get_args

import openai.types.realtime as types
from openai._models import BaseModel

from vllm_omni_ext.errors import RequestError
from vllm_omni_ext.serving.realtime.limits import Limits
from vllm_omni_ext.serving.realtime.response import Usage
from vllm_omni_ext.serving.realtime.session import Abort, Detection, Generate, Session
from vllm_omni_ext.serving.realtime.settings import Offer

VOICES = ("ethan", "chelsie")
FRAME_MS = 32
SPOKEN, SILENT = 1.0, 0.0
PCM_MS = 48


def check_voice(name: str) -> None:
    if name not in VOICES:
        raise RequestError(f"audio.voice: '{name}' is unknown; use one of {', '.join(VOICES)}", parameter="audio.voice")


OFFER = Offer(
    model="tiny",
    names=frozenset({"tiny"}),
    modalities=("text", "audio"),
    voice="ethan",
    check_voice=check_voice,
    detectors=("server_vad",),
    tracing=None,
)


class Ids:
    """Ids that count by prefix: item_1, item_2, event_1."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def __call__(self, prefix: str) -> str:
        self._counts[prefix] += 1
        return f"{prefix}_{self._counts[prefix]}"


class Playback:
    """A client that has played a given part of each sound."""

    def __init__(self) -> None:
        self.played: dict[str, float] = {}
        self.remaining: dict[str, float] = {}

    def played_ms(self, response_id: str) -> float:
        return self.played.get(response_id, 0.0)

    def remaining_ms(self, response_id: str) -> float:
        return self.remaining.get(response_id, 0.0)


class Speech:
    """Turn detection, in place of `SpeechFrames`, in frames of `frame_ms`; a frame that is not silent is speech."""

    def __init__(self, frame_ms: int = 20) -> None:
        self._frame_bytes = frame_ms * PCM_MS
        self.ms = 0.0

    def begin(self, sound_format: Any, from_ms: float) -> None:
        self.ms = from_ms

    def completeness(self, start_ms: float, end_ms: float) -> float:
        raise AssertionError

    async def push(self, data: bytes, detector: Any) -> list[tuple[float, float]]:
        frames = []
        for at in range(0, len(data), self._frame_bytes):
            piece = data[at : at + self._frame_bytes]
            self.ms += len(piece) / PCM_MS
            frames.append((self.ms, float(any(piece))))
        return frames


def silence(ms: float) -> str:
    """Return base64 of silence at 24 kHz."""
    return base64.b64encode(bytes(round(ms) * PCM_MS)).decode()


MANUAL = {"type": "realtime", "audio": {"input": {"turn_detection": None}}}


class Driver:
    """A session, its events and its commands. Every event is checked."""

    def __init__(self, *, offer: Offer = OFFER, limits: Limits | None = None, manual: bool = True) -> None:
        self.playback = Playback()
        self.session = Session(offer, limits or Limits(), self.playback, new_id=Ids(), expires_at=100)
        self.checker = Checker()
        self.events: list[dict[str, Any]] = []
        self.commands: list[Any] = []
        self.ms = 0.0
        self.take(self.session.begin())
        if manual:
            self.send("session.update", session=MANUAL)

    def take(self, outs: list[Any]) -> list[dict[str, Any]]:
        """Check and keep what the session returns; returns its events."""
        events = [each for each in outs if isinstance(each, dict)]
        for event in events:
            self.checker.take(event)
        self.events += events
        self.commands += [each for each in outs if not isinstance(each, dict)]
        return events

    def send(self, kind: str, **fields: Any) -> list[dict[str, Any]]:
        """Send an event of the client."""
        return self.take(self.session.receive(json.dumps({"type": kind, **fields})))

    def append(self, ms: float) -> list[dict[str, Any]]:
        return self.send("input_audio_buffer.append", audio=silence(ms))

    def hear(self, ms: float, probability: float) -> list[dict[str, Any]]:
        """Append sound in frames of one probability of speech."""
        events = []
        for _ in range(round(ms / FRAME_MS)):
            events += self.append(FRAME_MS)
            self.ms += FRAME_MS
            events += self.take(self.session.frames([(self.ms, probability)]))
        return events

    def respond(self, **fields: Any) -> str:
        """Send `response.create`; returns the response's id."""
        self.send("response.create", **({"response": fields} if fields else {}))
        return self.generate.response_id

    def answer(self, response_id: str, *texts: str, ms: float = 0, finish: str = "stop") -> None:
        """Answer a response to its end."""
        for text in texts:
            self.take(self.session.text(response_id, text))
        if ms:
            self.session.made(response_id, ms, last=True)
            self.take(self.session.sound(response_id, bytes(round(ms) * PCM_MS), ms))
        self.take(self.session.generated(response_id, finish, Usage(prompt=5, text=2, audio=1)))
        self.take(self.session.drained(response_id))

    def user(self, text: str, **fields: Any) -> list[dict[str, Any]]:
        """Add a user's text."""
        item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}], **fields}
        return self.send("conversation.item.create", item=item)

    @property
    def generate(self) -> Generate:
        """The last request to the model."""
        return next(each for each in reversed(self.commands) if isinstance(each, Generate))

    def aborted(self) -> list[str]:
        return [each.response_id for each in self.commands if isinstance(each, Abort)]

    def detection(self) -> Detection:
        return next(each for each in reversed(self.commands) if isinstance(each, Detection))

    def kinds(self) -> list[str]:
        return [event["type"] for event in self.events]

    def last(self, kind: str) -> dict[str, Any]:
        return next(event for event in reversed(self.events) if event["type"] == kind)


def kinds(events: list[dict[str, Any]]) -> list[str]:
    """The types of events."""
    return [event["type"] for event in events]


SERVER_EVENTS: dict[str, type[BaseModel]] = {
    get_args(kind.model_fields["type"].annotation)[0]: kind for kind in get_args(get_args(types.RealtimeServerEvent)[0])
}
SESSION_FIELDS = (
    types.RealtimeSessionCreateRequest.model_fields.keys()
    | types.realtime_session_create_response.RealtimeSessionCreateResponse.model_fields.keys()
)
"""The server also sends the session's id, object and expiry, which the type of `session.created` lacks."""


def check_type(event: dict[str, Any]) -> BaseModel:
    """Check an event against the type of the official client: all values fit, and no field is unknown."""
    model = SERVER_EVENTS[event["type"]].model_validate(json.loads(json.dumps(event)))
    unknown = list(_unknown(model, event["type"]))
    assert not unknown, unknown
    return model


def _unknown(value: Any, path: str) -> Any:
    if isinstance(value, list):
        for at, each in enumerate(value):
            yield from _unknown(each, f"{path}[{at}]")
    if isinstance(value, BaseModel):
        allowed = SESSION_FIELDS if isinstance(value, types.RealtimeSessionCreateRequest) else frozenset()
        yield from (f"{path}.{name}" for name in (value.model_extra or {}) if name not in allowed)
        for name in type(value).model_fields:
            yield from _unknown(getattr(value, name), f"{path}.{name}")


class Checker:
    """Follows the events of one session as a client does, and checks what always holds."""

    def __init__(self) -> None:
        self.ids: set[str] = set()
        self.items: list[str] = []
        self.open: dict[str, dict[str, list[str]]] = {}
        """By response in progress, the events of each of its items."""
        self.ended: set[str] = set()
        self.current: str | None = None
        self.started = False

    def take(self, event: dict[str, Any]) -> None:
        check_type(event)
        assert list(event)[:2] == ["type", "event_id"]
        assert event["event_id"] not in self.ids
        self.ids.add(event["event_id"])
        kind = event["type"]
        assert self.started == (kind != "session.created")
        self.started = True
        if kind.startswith("response."):
            self._response(kind, event)
        elif kind == "conversation.item.added":
            self._added(event["item"]["id"], event["previous_item_id"])
        elif kind == "conversation.item.deleted":
            self.items.remove(event["item_id"])
        elif kind == "conversation.item.done":
            at = self.items.index(event["item"]["id"])
            assert event["previous_item_id"] == (self.items[at - 1] if at else None)

    def _added(self, item_id: str, previous: str | None) -> None:
        assert item_id not in self.items
        self.items.insert(0 if previous is None else self.items.index(previous) + 1, item_id)

    def _response(self, kind: str, event: dict[str, Any]) -> None:
        if kind == "response.created":
            found = event["response"]
            assert found["id"] not in self.open | dict.fromkeys(self.ended)
            assert (found["status"], found["output"]) == ("in_progress", [])
            self.open[found["id"]] = {}
            if found["conversation_id"] is not None:
                assert self.current is None
                self.current = found["id"]
            return
        response_id = event["response"]["id"] if kind == "response.done" else event["response_id"]
        items = self.open[response_id]
        if kind == "response.done":
            assert [each["id"] for each in event["response"]["output"]] == list(items)
            assert all(seen[-1] == "response.output_item.done" for seen in items.values())
            assert all(each["status"] != "in_progress" for each in event["response"]["output"])
            del self.open[response_id]
            self.ended.add(response_id)
            self.current = None if self.current == response_id else self.current
            return
        item_id = event.get("item_id") or event["item"]["id"]
        if kind == "response.output_item.added":
            assert item_id not in items and event["output_index"] == len(items)
            items[item_id] = []
        assert event["output_index"] == list(items).index(item_id)
        seen = items[item_id]
        assert kind not in seen or kind.endswith(".delta"), kind
        assert all(before in seen for before in NEEDS.get(kind, ())), (kind, seen)
        assert not any(after in seen for after in ENDS.get(kind, ())), (kind, seen)
        assert "response.output_item.done" not in seen
        seen.append(kind)


_ADDED, _PART, _PART_DONE = (
    "response.output_item.added",
    "response.content_part.added",
    "response.content_part.done",
)
_CALL = "response.function_call_arguments"
NEEDS = {
    _PART: (_ADDED,),
    _PART_DONE: (_PART,),
    f"{_CALL}.delta": (_ADDED,),
    f"{_CALL}.done": (_ADDED,),
    **{
        f"response.output_{name}.{end}": (_PART,)
        for name in ("text", "audio", "audio_transcript")
        for end in ("delta", "done")
    },
}
"""Events of an item that come before an event."""
ENDS = {
    f"{name}.delta": (f"{name}.done",)
    for name in (_CALL, "response.output_text", "response.output_audio", "response.output_audio_transcript")
}
"""Events of an item that do not come before an event."""
