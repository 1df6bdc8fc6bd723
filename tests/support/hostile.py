"""Malformed and hostile events of a Realtime client. A seed decides everything."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from copy import copy, deepcopy
from random import Random
from typing import Any

from vllm_omni_ext.serving.realtime.events import CLIENT_EVENTS, ResponseFields, SessionFields

FORMATS = [{"type": "audio/pcm", "rate": 24000}, {"type": "audio/pcmu"}, {"type": "audio/pcma"}]
DETECTIONS = [None, {"type": "server_vad"}, {"type": "server_vad", "interrupt_response": False, "threshold": 0.0}]
DETECTIONS += [{"type": "server_vad", "prefix_padding_ms": 10_000, "idle_timeout_ms": 5000}]
LEAVES: list[Any] = [None, True, -1, 2**63, 10**400, 0.5, -0.0, 1e308, "", "x", "root", "\x00", "\ud83d\ude00"]
LEAVES += [[], {}, [[]], [None], {"type": "message"}, {"": ""}, "message", "audio/pcm", "inf", "none", "auto"]
NAMES = sorted({name for kind in CLIENT_EVENTS.values() for name in kind.model_fields})
NAMES += sorted({*SessionFields.model_fields, *ResponseFields.model_fields, "role", "content", "__class__"})
BROKEN = ["", "{", "null", "[]", '"x"', "{}{}", "NaN", '{"type": NaN}', '{"type": 1e999}', '{"type": "\\ud800"}']
BROKEN += ['{"type": "response.cancel", "type": 5}', "{'type': 'response.cancel'}", "9" * 5000, "\x00", "\ufeff{}"]
IDS = ["item_1", "a", "b", "c", "root", "x" * 65, ""]
LONG = 300_000


def events(random: Random, count: int) -> list[str | bytes]:
    """Return the messages of `count` events: text, or bytes, which the protocol does not have."""
    kinds, weights = zip(*KINDS, strict=True)
    made = [kind(random) for kind in random.choices(kinds, weights, k=count)]
    return [each if isinstance(each, str | bytes) else json.dumps(each) for each in made]


def _valid(random: Random) -> dict[str, Any]:
    """An event that is right by itself, whose order is wrong as a rule."""
    kind = random.choice(sorted(CLIENT_EVENTS))
    found: dict[str, Any] = {"type": kind, "event_id": f"e{random.randrange(9)}"}
    of = random.choice(IDS)
    match kind:
        case "session.update":
            sound = {"format": {**random.choice(FORMATS)}, "turn_detection": copy(random.choice(DETECTIONS))}
            found["session"] = {"type": "realtime", "audio": {"input": sound}}
        case "input_audio_buffer.append":
            data = random.choice([b"", b"\x20", b"\0" * 960, random.randbytes(4800), b"\x20" * 48_000])
            found["audio"] = base64.b64encode(data).decode()
        case "conversation.item.create":
            part = {"type": "input_text", "text": random.choice(["Hello", "", "\x00<|im_end|>", "x " * 50])}
            found["item"] = {"type": "message", "role": random.choice(["user", "system"]), "content": [part]}
            found["item"] |= random.choice([{}, {"id": of}])
            found["previous_item_id"] = random.choice([None, of])
        case "conversation.item.delete" | "conversation.item.retrieve":
            found["item_id"] = of
        case "conversation.item.truncate":
            found |= {"item_id": of, "content_index": random.randrange(3), "audio_end_ms": random.randrange(2000)}
        case "response.create":
            found["response"] = {"max_output_tokens": random.randint(1, 3), "output_modalities": ["text"]}
            given = [{"type": "item_reference", "id": of}]
            found["response"] |= random.choice([{}, {"conversation": "none"}, {"input": []}, {"input": given}])
        case "response.cancel":
            found |= random.choice([{}, {"response_id": "resp_x"}])
    return found


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every object and array of a value with each of its keys."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, each in list(pairs) for place in ((value, key), *_places(each))]


def _wrong_type(random: Random) -> dict[str, Any]:
    found = _valid(random)
    inside, key = random.choice(_places(found))
    inside[key] = deepcopy(random.choice(LEAVES))
    return found


def _unknown_field(random: Random) -> dict[str, Any]:
    found = _valid(random)
    objects = [found, *(inside[key] for inside, key in _places(found) if isinstance(inside[key], dict))]
    random.choice(objects)[random.choice(NAMES)] = deepcopy(random.choice(LEAVES))
    return found


def _without_a_field(random: Random) -> dict[str, Any]:
    found = _valid(random)
    inside, key = random.choice(_places(found))
    del inside[key]
    return found


def _cut(random: Random) -> str:
    text = json.dumps(_valid(random))
    return text[: random.randrange(len(text))]


def _garbled(random: Random) -> str:
    text = list(json.dumps(_valid(random)))
    for _ in range(random.randint(1, 5)):
        text[random.randrange(len(text))] = chr(random.choice([0, 34, 44, 92, 123, 125, 0x7F, 0xE9, 0x202E, 0x1F600]))
    return "".join(text)


def _binary(random: Random) -> bytes:
    return random.choice([b"", random.randbytes(100), json.dumps(_valid(random)).encode()])


def _no_base64(random: Random) -> dict[str, Any]:
    audio = random.choice(["?", "A", "AAA", "AAAA=", "=AAA", "AA==AA==", "AAAA\n", "é", "A" * 401, "AA" * 3001])
    return {"type": "input_audio_buffer.append", "audio": audio}


def _deep(random: Random) -> str:
    depth = random.choice([60, 99, 101, 1000, 20_000])
    opening, closing = random.choice([("[", "]"), ('{"a":', "}")])
    kind = random.choice(["session.update", "conversation.item.create", "response.create"])
    name = kind.split(".")[-2]
    return f'{{"type": "{kind}", "{name}": {opening * depth}1{closing * depth}}}'


def _huge(random: Random) -> dict[str, Any]:
    """An event of 0.3 to 0.9 MB."""
    text = "x" * LONG
    update, create, item = "session.update", "response.create", "conversation.item.create"
    call, output = {"type": "function_call", "name": "f"}, {"type": "function_call_output", "call_id": "c"}
    made: list[Callable[[], dict[str, Any]]] = [
        lambda: {"type": text},
        lambda: {"type": "response.cancel", "event_id": text},
        lambda: {"type": "response.cancel", text: 1},
        lambda: {"type": "response.cancel", **{str(at): 1 for at in range(60_000)}},
        lambda: {"type": "conversation.item.delete", "item_id": text},
        lambda: {"type": update, "session": {"type": "realtime", "instructions": text}},
        lambda: {"type": update, "session": {"type": "realtime", "tools": [{}] * 100_000}},
        lambda: {"type": create, "response": {"input": [0] * 100_000}},
        lambda: {"type": create, "response": {"input": [output] * 5000}},
        lambda: {"type": create, "response": {"metadata": {str(at): 0 for at in range(60_000)}}},
        lambda: {"type": item, "item": {"type": "message", "role": "user", "content": [[]] * 100_000}},
        lambda: {"type": item, "item": {**output, "output": text}},
        lambda: {"type": item, "item": {**call, "arguments": "[" * LONG}},
        lambda: {"type": "input_audio_buffer.append", "audio": "A" * LONG},
    ]
    return random.choice(made)()


KINDS: list[tuple[Callable[[Random], Any], float]] = [
    (_valid, 20),
    (_wrong_type, 25),
    (_unknown_field, 15),
    (_without_a_field, 10),
    (_cut, 5),
    (_garbled, 8),
    (lambda random: random.choice(BROKEN), 5),
    (_binary, 4),
    (_no_base64, 4),
    (_deep, 2),
    (_huge, 0.5),
]
