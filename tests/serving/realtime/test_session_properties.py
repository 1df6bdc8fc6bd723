"""Any order of events of the client, the turn detector and the model keeps the rules of the protocol."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import hostile
from tests.support.realtime import OFFER, SILENT, SPOKEN, Driver
from vllm_omni_ext.serving.realtime import events
from vllm_omni_ext.serving.realtime.events import CLIENT_EVENTS, ResponseFields, SessionFields
from vllm_omni_ext.serving.realtime.limits import Limits
from vllm_omni_ext.serving.realtime.response import Usage
from vllm_omni_ext.serving.realtime.session import ComputeAhead, StopAhead

ITEM_IDS = st.sampled_from(["a", "b", "c", "root", "item_1", "item_2", "item_3", "item_5", None])
NEW_IDS = st.sampled_from(["a", "b", "c", None])
RESPONSE_IDS = st.sampled_from(["resp_1", "resp_2", "resp_3", "resp_4"])
TEXT = {"type": "input_text", "text": "x"}
CALL = {"type": "function_call", "name": "f", "arguments": "{}"}


def item_of(item_id: str | None, content: list[Any]) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": content} | ({} if item_id is None else {"id": item_id})


CLIENT = st.one_of(
    st.tuples(st.just("append"), st.sampled_from([0, 10, 100, 900])),
    st.tuples(st.sampled_from(["input_audio_buffer.commit", "input_audio_buffer.clear", "output_audio_buffer.clear"])),
    st.tuples(st.just("item"), NEW_IDS, ITEM_IDS, st.sampled_from([[], [TEXT], [TEXT, TEXT], [{"type": "x"}], 5])),
    st.tuples(st.just("call"), NEW_IDS),
    st.tuples(st.sampled_from(["delete", "retrieve"]), ITEM_IDS),
    st.tuples(st.just("truncate"), ITEM_IDS, st.integers(-1, 1), st.sampled_from([0, 50, 10_000])),
    st.tuples(
        st.just("respond"),
        st.sampled_from([None, {"conversation": "none"}, {"output_modalities": ["text"]}, {"input": [CALL]}, {"x": 1}]),
    ),
    st.tuples(st.just("cancel"), st.none() | RESPONSE_IDS),
    st.tuples(
        st.just("update"),
        st.sampled_from(
            [
                {"turn_detection": None},
                {"turn_detection": {"type": "server_vad", "interrupt_response": False}},
                {"turn_detection": {"type": "server_vad", "interrupt_response": True, "idle_timeout_ms": 5000}},
                {"transcription": {}},
                {"transcription": None},
                {"format": {"type": "audio/pcmu"}},
                {"format": 3},
            ]
        ),
    ),
)
MODEL = st.one_of(
    st.tuples(st.just("text"), RESPONSE_IDS, st.sampled_from(["", "one ", "two three "])),
    st.tuples(st.just("sound"), RESPONSE_IDS, st.booleans()),
    st.tuples(st.just("function"), RESPONSE_IDS, st.integers(0, 1), st.sampled_from(["", "{", "}"])),
    st.tuples(st.just("generated"), RESPONSE_IDS, st.sampled_from(["stop", "length", "tool_calls"])),
    st.tuples(st.sampled_from(["drained", "failed", "shorten"]), RESPONSE_IDS),
    st.tuples(st.just("transcribed"), st.sampled_from(["item_1", "item_2", "item_3"])),
    st.tuples(st.just("hear"), st.sampled_from([SPOKEN, SILENT]), st.sampled_from([64, 96, 640])),
)


def do(driver: Driver, step: tuple[Any, ...]) -> None:
    """Carry out one step; an event of the client gets an answer, an error of its own at least."""
    session, (name, *args) = driver.session, step
    match name:
        case "append":
            driver.append(args[0])
        case "item":
            driver.send("conversation.item.create", item=item_of(args[0], args[2]), previous_item_id=args[1])
        case "call":
            driver.send("conversation.item.create", item={**CALL, "id": args[0]})
        case "delete" | "retrieve":
            assert driver.send(f"conversation.item.{name}", item_id=args[0])
        case "truncate":
            fields = {"item_id": args[0], "content_index": args[1], "audio_end_ms": args[2]}
            assert driver.send("conversation.item.truncate", **fields)
        case "respond":
            assert driver.send("response.create", response=args[0])
        case "cancel":
            assert driver.send("response.cancel", response_id=args[0])
        case "update":
            assert len(driver.send("session.update", session={"type": "realtime", "audio": {"input": args[0]}})) == 1
        case "sound":
            session.made(args[0], 200, last=args[1])
            driver.take(session.sound(args[0], bytes(96), 100))
            driver.playback.played[args[0]] = 50
        case "text":
            driver.take(session.text(*args))
        case "function":
            driver.take(session.call(args[0], args[1], "f", args[2]))
        case "generated":
            driver.take(session.generated(*args, Usage()))
        case "drained":
            driver.take(session.drained(args[0]))
        case "failed":
            driver.take(session.failed(args[0], "no", kind="server_error", code="x"))
        case "shorten":
            driver.take(session.shorten(args[0]))
        case "transcribed":
            driver.take(session.transcribed(args[0], "x", Usage()))
        case "hear":
            if session.settings["audio"]["input"]["format"]["type"] == "audio/pcm":
                driver.hear(args[1], args[0])
        case _:
            assert driver.send(name)


@pytest.mark.slow
@given(steps=st.lists(CLIENT | MODEL, max_size=40), manual=st.booleans())
@settings(max_examples=300, deadline=None)
def test_every_order_of_events_keeps_the_rules(steps: list[tuple[Any, ...]], manual: bool) -> None:
    limits = Limits(items=12, buffer_bytes=48 * 2000, responses=2)
    driver = Driver(offer=replace(OFFER, block_ms=300.0), manual=manual, limits=limits)
    for step in steps:
        do(driver, step)
        session, checker = driver.session, driver.checker
        ahead = [each for each in driver.commands if isinstance(each, (ComputeAhead, StopAhead))]
        if ahead and isinstance(ahead[-1], ComputeAhead):  # the sound of a turn that has not ended
            turn = session.detector is None or session.detector.speaking
            sound = ahead[-1].messages[-1]["content"][0]["input_audio"]
            assert turn and session.buffer.peek().data.startswith(sound.data)
        assert [item.id for item in session.conversation] == checker.items
        assert set(session.responses) == set(checker.open)
        assert len(session.buffer) <= limits.buffer_bytes
    for response in driver.session.responses:
        driver.answer(response, "end")
    assert not driver.checker.open and not driver.session.busy


NAMES = sorted({name for model in CLIENT_EVENTS.values() for name in model.model_fields} | {"x", "role", "content"})
SESSION_NAMES = sorted({*SessionFields.model_fields, *ResponseFields.model_fields, "input", "output", "format", "id"})
LEAVES = st.none() | st.booleans() | st.integers(-2, 10**30) | st.floats() | st.text(max_size=8) | st.just("message")
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(SESSION_NAMES), inner, max_size=4),
    max_leaves=8,
)
MESSAGES = st.one_of(
    st.text(max_size=20),
    VALUES.map(json.dumps),
    st.builds(
        lambda kind, fields: json.dumps({**fields, "type": kind}),
        st.sampled_from(sorted(CLIENT_EVENTS)),
        st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4),
    ),
)


@pytest.mark.slow
@given(messages=st.lists(MESSAGES, max_size=8))
@settings(max_examples=300, deadline=None)
def test_no_message_breaks_a_session(messages: list[str]) -> None:
    driver = Driver()
    for message in messages:
        for event in driver.take(driver.session.receive(message)):
            if event["type"] == "error":
                assert event["error"]["message"] and event["error"]["code"]
    if driver.session.busy:
        driver.send("response.cancel")
    driver.answer(driver.respond(output_modalities=["text"]), "yes")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_no_hostile_event_breaks_a_session_or_grows_it_beyond_its_limits(seed: int) -> None:
    random = Random(seed)
    limits = Limits(items=40, parts=60, text_bytes=500_000, sound_bytes=200_000, buffer_bytes=300_000)
    driver = Driver(manual=False, limits=limits)
    session, quiet = driver.session, 0
    for message in hostile.events(random, 2500):
        if isinstance(message, bytes):
            continue
        quiet += not driver.take(session.receive(message))
        if session.busy and random.random() < 0.5:
            driver.answer(random.choice(session.responses), "yes")
        items = list(session.conversation)
        assert len(items) <= limits.items + 1 and sum(len(each.content) for each in items) <= limits.parts + 1
        assert sum(each.sound_bytes() for each in items) <= limits.sound_bytes
        assert sum(each.text_bytes() for each in items) <= limits.text_bytes + len("yes")
        assert len(session.buffer) <= limits.buffer_bytes
        driver.commands.clear()
    assert quiet < 200, "only sound has no answer"
    for response in session.responses:
        driver.answer(response, "end")
    driver.answer(driver.respond(output_modalities=["text"], conversation="none"), "yes")
    assert not driver.checker.open


@pytest.mark.slow
@pytest.mark.parametrize(
    "event",
    [
        {"type": "response.create", "response": {"input": [0] * 190_000}},
        {"type": "response.create", "response": {"metadata": {str(at): 0 for at in range(190_000)}}},
        {"type": "response.cancel", **{str(at): 0 for at in range(190_000)}},
        {"type": "session.update", "session": {"type": "realtime", **{str(at): 0 for at in range(190_000)}}},
        {"type": "session.update", "session": {"type": "realtime", "tools": [0] * 190_000}},
        {"type": "conversation.item.create", "item": {"type": "message", "role": "user", "content": [0] * 190_000}},
    ],
)
def test_an_event_with_many_wrong_values_gets_one_error(event: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    stock = events.as_client_error
    monkeypatch.setattr(
        events, "as_client_error", lambda error, path: found.append(error.error_count()) or stock(error, path)
    )
    driver = Driver()
    (error,) = driver.take(driver.session.receive(json.dumps(event)))
    assert error["type"] == "error" and found == [1]
