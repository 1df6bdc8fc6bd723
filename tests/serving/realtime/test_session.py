"""Sessions: settings, items, input sound, responses and turns, from event to event."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.realtime import OFFER, SILENT, SPOKEN, Driver, check_type, kinds, silence
from vllm_omni_ext.serving.realtime.events import ClientError
from vllm_omni_ext.serving.realtime.limits import Limits
from vllm_omni_ext.serving.realtime.pacing import Pacer
from vllm_omni_ext.serving.realtime.response import Usage
from vllm_omni_ext.serving.realtime.session import Detect, Detection, StopTranscribing, Transcribe
from vllm_omni_ext.serving.realtime.settings import Offer

BEGUN = [
    "response.output_item.added",
    "conversation.item.added",
    "response.content_part.added",
]
ENDED = ["response.content_part.done", "conversation.item.done", "response.output_item.done", "response.done"]
COMMITTED = ["input_audio_buffer.committed", "conversation.item.added", "conversation.item.done"]


def update(driver: Driver, **fields: Any) -> dict[str, Any]:
    """Send `session.update`; returns the event that answers it."""
    (event,) = driver.send("session.update", session={"type": "realtime", **fields})
    return event


def error_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    (event,) = events
    assert event["type"] == "error", event
    return event["error"]


# -- settings -----------------------------------------------------------------------------------------------


def test_a_session_begins_with_its_defaults() -> None:
    driver = Driver(manual=False)
    (created,) = driver.events
    session = created["session"]
    assert session["output_modalities"] == ["audio"]
    assert session["audio"]["input"]["turn_detection"]["silence_duration_ms"] == 500
    assert session["audio"]["output"] == {"format": {"type": "audio/pcm", "rate": 24000}, "voice": "ethan", "speed": 1}
    assert driver.detection().format == {"type": "audio/pcm", "rate": 24000}


def test_a_model_without_sound_and_a_server_without_a_detector_begin_with_text_and_manual_turns() -> None:
    offer = Offer(**{**vars(OFFER), "modalities": ("text",), "voice": None, "detectors": ()})
    driver = Driver(offer=offer, manual=False)
    session = driver.events[0]["session"]
    assert (session["output_modalities"], session["audio"]["input"]["turn_detection"]) == (["text"], None)
    assert driver.commands == []
    assert update(driver, output_modalities=["audio"])["error"]["param"] == "session.output_modalities"
    vad = {"input": {"turn_detection": {"type": "server_vad"}}}
    assert update(driver, audio=vad)["error"]["param"] == "session.audio.input.turn_detection.type"


@pytest.mark.parametrize("of_server", ["auto", None])
def test_a_session_is_traced_if_the_server_is(of_server: Any) -> None:
    driver = Driver(offer=replace(OFFER, tracing=of_server))
    assert driver.last("session.created")["session"]["tracing"] == of_server
    for given in ("auto", None):
        session = update(driver, tracing=given, instructions=str(given))["session"]
        assert (session["tracing"], session["instructions"]) == (of_server, str(given))


def test_an_update_changes_the_given_fields_only() -> None:
    driver = Driver(manual=False)
    update(driver, audio={"input": {"turn_detection": {"type": "server_vad", "threshold": 0.7}}})
    update(driver, instructions="Be brief.", audio={"output": {"voice": "chelsie"}})
    session = update(driver, audio={"input": {"turn_detection": {"type": "server_vad", "silence_duration_ms": 200}}})[
        "session"
    ]
    detection = session["audio"]["input"]["turn_detection"]
    assert (detection["threshold"], detection["silence_duration_ms"]) == (0.7, 200)
    assert (session["instructions"], session["audio"]["output"]["voice"]) == ("Be brief.", "chelsie")
    assert update(driver, instructions=None)["session"]["instructions"] == ""


def test_null_sets_fields_of_objects_to_their_defaults() -> None:
    driver = Driver(manual=False)
    default = driver.events[0]["session"]["audio"]
    changed = {"type": "server_vad", "threshold": 0.7, "prefix_padding_ms": 10, "create_response": False}
    update(driver, audio={"input": {"turn_detection": changed}})
    nulls = {**dict.fromkeys(changed), "type": "server_vad"}
    assert update(driver, audio={"input": {"turn_detection": nulls}})["session"]["audio"] == default
    unknown = {"type": "server_vad", "volume": None}
    error = update(driver, audio={"input": {"turn_detection": unknown}})["error"]
    assert error["param"] == "session.audio.input.turn_detection.volume"
    pcm = {"type": "audio/pcm", "rate": None}
    assert update(driver, audio={"output": {"format": pcm}})["session"]["audio"] == default


@pytest.mark.parametrize("given", [None, {"input": None, "output": None}])
def test_null_sets_all_of_audio_to_its_defaults(given: Any) -> None:
    driver = Driver(manual=False)
    default = driver.events[0]["session"]["audio"]
    fields = {"format": {"type": "audio/pcmu"}, "turn_detection": None, "transcription": {"language": "de"}}
    update(driver, audio={"input": fields, "output": {"format": {"type": "audio/pcma"}, "voice": "chelsie"}})
    assert update(driver, audio=given)["session"]["audio"] == default
    update(driver, audio={"output": {"voice": "chelsie"}})
    assert update(driver, audio={"input": None})["session"]["audio"]["output"]["voice"] == "chelsie"


def test_unchanged_settings_are_shared_and_not_copied() -> None:
    driver = Driver()
    update(driver, tools=[{"type": "function", "name": "f", "parameters": {}}])
    tools = driver.session.settings["tools"]
    update(driver, instructions="Be brief.")
    driver.respond(instructions="Be long.")
    assert driver.session.settings["tools"] is tools and driver.generate.settings["tools"] is tools


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"temperature": 0.8}, "session.temperature", "unknown_parameter"),
        ({"model": "other"}, "session.model", "invalid_value"),
        ({"output_modalities": ["text", "audio"]}, "session.output_modalities", "invalid_value"),
        ({"output_modalities": ["video"]}, "session.output_modalities[0]", "invalid_value"),
        ({"instructions": 5}, "session.instructions", "invalid_type"),
        ({"max_output_tokens": 0}, "session.max_output_tokens", "invalid_value"),
        ({"max_output_tokens": True}, "session.max_output_tokens", "invalid_value"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "session.tools[0].type", "unsupported_value"),
        ({"tools": [{"type": "function"}]}, "session.tools[0].name", "missing_required_parameter"),
        ({"tool_choice": "any"}, "session.tool_choice", "invalid_value"),
        ({"tool_choice": {"type": "mcp", "server_label": "x"}}, "session.tool_choice", "unsupported_value"),
        ({"prompt": {"id": "x"}}, "session.prompt", "unsupported_value"),
        ({"reasoning": {"effort": "low"}}, "session.reasoning", "unsupported_value"),
        ({"tracing": {"workflow_name": "a"}}, "session.tracing", "unsupported_value"),
        ({"tracing": "on"}, "session.tracing", "invalid_value"),
        ({"include": ["item.input_audio_transcription.logprobs"]}, "session.include", "unsupported_value"),
        ({"truncation": "never"}, "session.truncation", "invalid_value"),
        (
            {"truncation": {"type": "retention_ratio", "retention_ratio": 2}},
            "session.truncation.retention_ratio",
            "invalid_value",
        ),
        (
            {"truncation": {"type": "retention_ratio", "retention_ratio": 0.5, "token_limits": {}}},
            "session.truncation.token_limits",
            "unsupported_value",
        ),
        ({"audio": {"output": {"voice": "nobody"}}}, "session.audio.output.voice", "invalid_value"),
        ({"audio": {"output": {"speed": 1.2}}}, "session.audio.output.speed", "unsupported_value"),
        ({"audio": {"output": {"format": {"type": "audio/mp3"}}}}, "session.audio.output.format.type", "invalid_value"),
        (
            {"audio": {"input": {"format": {"type": "audio/pcm", "rate": 16000}}}},
            "session.audio.input.format.rate",
            "invalid_value",
        ),
        (
            {"audio": {"input": {"noise_reduction": {"type": "near_field"}}}},
            "session.audio.input.noise_reduction",
            "unsupported_value",
        ),
        (
            {"audio": {"input": {"transcription": {"model": "other"}}}},
            "session.audio.input.transcription.model",
            "unsupported_value",
        ),
        (
            {"audio": {"input": {"transcription": {"delay": "low"}}}},
            "session.audio.input.transcription.delay",
            "unsupported_value",
        ),
        (
            {"audio": {"input": {"turn_detection": {"type": "server_vad", "threshold": 2}}}},
            "session.audio.input.turn_detection.threshold",
            "invalid_value",
        ),
        (
            {"audio": {"input": {"turn_detection": {"type": "semantic_vad"}}}},
            "session.audio.input.turn_detection.type",
            "unsupported_value",
        ),
    ],
)
def test_a_field_that_cannot_be_met_is_refused_by_name_and_changes_nothing(
    fields: dict[str, Any], param: str, code: str
) -> None:
    driver = Driver()
    before = json.dumps(driver.session.settings)
    (event,) = driver.send(
        "session.update", event_id="mine", session={"type": "realtime", "parallel_tool_calls": False, **fields}
    )
    error = event["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)
    assert error["event_id"] == "mine" and error["message"].startswith(param)
    assert json.dumps(driver.session.settings) == before


@pytest.mark.parametrize("given", [{"language": "en"}, {"model": "adapter"}, {"model": "base"}, {"prompt": "x"}])
def test_the_transcription_of_an_adapter_is_updated(given: dict[str, Any]) -> None:
    driver = Driver(offer=replace(OFFER, model="adapter", names=frozenset({"base"})))
    update(driver, audio={"input": {"transcription": {"language": "de"}}})
    session = update(driver, audio={"input": {"transcription": given}})["session"]
    expected = {"model": "adapter", "language": "de", "prompt": None} | given | {"model": "adapter"}
    assert session["audio"]["input"]["transcription"] == expected


def test_a_transcription_session_is_refused() -> None:
    error = error_of(Driver().send("session.update", session={"type": "transcription"}))
    assert (error["param"], error["code"]) == ("session.type", "unsupported_value")


def test_the_voice_cannot_change_after_the_first_sound() -> None:
    driver = Driver()
    driver.answer(driver.respond(), "Yes.", ms=100)
    error = update(driver, audio={"output": {"voice": "chelsie"}})["error"]
    assert error["code"] == "cannot_update_voice"
    assert "session" in update(driver, audio={"output": {"voice": "ethan"}})
    own = {"audio": {"output": {"voice": "chelsie"}}}
    assert error_of(driver.send("response.create", response=own))["param"] == "response.audio.output.voice"


# -- messages that are no events ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "param", "code"),
    [
        ("hello", None, "invalid_json"),
        ("[" * 100_000, None, "invalid_json"),
        ('{"type": NaN}', None, "invalid_json"),
        ("[" + "0," * 300_000 + "0]", None, "event_too_large"),
        ("[]", None, "invalid_type"),
        ("{}", "type", "missing_required_parameter"),
        ('{"type": "session.delete"}', "type", "invalid_value"),
        ('{"type": ["x"]}', "type", "invalid_value"),
        ('{"type": "response.cancel", "event_id": 5}', "event_id", "invalid_type"),
        ('{"type": "input_audio_buffer.append"}', "audio", "missing_required_parameter"),
        ('{"type": "input_audio_buffer.append", "audio": "%%"}', "audio", "invalid_value"),
        ('{"type": "input_audio_buffer.append", "audio": "AAA="}', None, None),
        ('{"type": "input_audio_buffer.append", "audio": "AAAA"}', "audio", "invalid_value"),
        ('{"type": "input_audio_buffer.commit", "final": true}', "final", "unknown_parameter"),
        ('{"type": "output_audio_buffer.clear"}', "type", "unsupported_event"),
        ('{"type": "response.cancel", "response_id": "\\ud800"}', "response_id", "invalid_value"),
        ('{"type": "response.cancel", "response_id": 1e999}', "response_id", "invalid_value"),
        ('{"type": "response.cancel", "\\ud800": 1}', r"\ud800", "invalid_value"),
        (
            '{"type": "session.update", "session": {"type": "realtime", "tools": [{"type": "function", "a": 1e999}]}}',
            "session.tools[0].a",
            "invalid_value",
        ),
        ('{"type": "session.update", "session": ' + "[" * 400 + "]" * 400 + "}", None, "event_too_large"),
    ],
)
def test_a_wrong_message_gets_an_error_and_the_session_goes_on(text: str, param: str | None, code: str | None) -> None:
    driver = Driver()
    events = driver.take(driver.session.receive(text))
    if code is None:
        assert events == []
    else:
        error = error_of(events)
        assert (error["param"], error["code"], error["event_id"]) == (param, code, None)
    assert kinds(driver.user("Hello")) == ["conversation.item.added", "conversation.item.done"]


# -- items ------------------------------------------------------------------------------------------------------


def test_items_have_the_order_that_the_client_gives_them() -> None:
    driver = Driver()
    driver.user("b", id="b")
    item = {"type": "message", "role": "system", "content": [{"type": "input_text", "text": "a"}], "id": "a"}
    events = driver.send("conversation.item.create", item=item, previous_item_id="root")
    assert [event["previous_item_id"] for event in events] == [None, None]
    item = {**item, "id": "c"}
    assert driver.send("conversation.item.create", item=item, previous_item_id="a")[0]["previous_item_id"] == "a"
    assert driver.checker.items == [each.id for each in driver.session.conversation] == ["a", "c", "b"]


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"type": "message", "role": "tool", "content": []}, "item.role"),
        ({"type": "mcp_call"}, "item.type"),
        ({"type": "item_reference", "id": "x"}, "item.type"),
        ({"type": "message", "role": "user", "content": [{"type": "input_text"}]}, "item.content[0].text"),
        (
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a", "audio": "AAAA"}]},
            "item.content[0].audio",
        ),
        (
            {"type": "message", "role": "user", "content": [{"type": "input_audio", "audio": "AAA="}]},
            "item.content[0].audio",
        ),
        (
            {"type": "message", "role": "user", "content": [{"type": "input_image", "image_url": "http://x/y.png"}]},
            "item.content[0].image_url",
        ),
        (
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_audio", "audio": "AAA=", "transcript": "a"}],
            },
            "item.content[0].audio",
        ),
        ({"type": "function_call", "name": "f", "arguments": "{"}, "item.arguments"),
        ({"type": "function_call_output", "output": "1"}, "item.call_id"),
    ],
)
def test_a_wrong_item_is_refused_by_the_path_of_its_field(item: dict[str, Any], param: str) -> None:
    driver = Driver()
    assert error_of(driver.send("conversation.item.create", item=item))["param"] == param
    assert driver.checker.items == []


@pytest.mark.parametrize("kind", ["mcp_call", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response"])
def test_items_of_mcp_are_not_supported(kind: str) -> None:
    error = error_of(Driver().send("conversation.item.create", item={"type": kind}))
    assert (error["param"], error["code"]) == ("item.type", "unsupported_value")


def test_an_unknown_item_and_a_used_id_are_refused() -> None:
    driver = Driver()
    driver.user("a", id="a")
    assert error_of(driver.user("b", id="a"))["code"] == "item_already_exists"
    for kind in ("retrieve", "delete"):
        assert error_of(driver.send(f"conversation.item.{kind}", item_id="b"))["code"] == "item_not_found"
    item = {"type": "message", "role": "user", "content": []}
    error = error_of(driver.send("conversation.item.create", item=item, previous_item_id="b"))
    assert error["param"] == "previous_item_id"


def test_a_retrieved_item_has_its_sound() -> None:
    driver = Driver()
    driver.append(120)
    _, added, _ = driver.send("input_audio_buffer.commit")
    assert added["item"]["content"] == [{"type": "input_audio", "transcript": None}]
    (event,) = driver.send("conversation.item.retrieve", item_id=added["item"]["id"])
    assert event["item"]["content"][0]["audio"] == silence(120)


def test_a_full_conversation_refuses_items() -> None:
    driver = Driver(limits=Limits(items=1))
    driver.user("a")
    assert error_of(driver.user("b"))["code"] == "conversation_too_large"
    driver = Driver(limits=Limits(sound_bytes=10_000))
    for ms in (110, 110):
        driver.append(ms)
    driver.send("input_audio_buffer.commit")
    assert driver.kinds()[-1] == "error"
    assert len(driver.session.buffer) > 0
    driver = Driver(limits=Limits(parts=2))
    texts = [{"type": "input_text", "text": ""}] * 3
    item = {"type": "message", "role": "user", "content": texts}
    assert error_of(driver.send("conversation.item.create", item=item))["code"] == "conversation_too_large"


def test_a_full_conversation_and_an_input_beyond_its_limits_begin_no_response() -> None:
    driver = Driver(limits=Limits(items=1, text_bytes=50))
    (item,) = (each["item"] for each in driver.user("a") if each["type"] == "conversation.item.done")
    assert error_of(driver.send("response.create"))["code"] == "conversation_too_large"
    driver.send("response.create", response={"conversation": "none"})
    assert driver.session.busy
    long = {"type": "function_call_output", "call_id": "c", "output": "x" * 60}
    for given in ([{"type": "item_reference", "id": item["id"]}] * 2, [long]):
        found = error_of(driver.send("response.create", response={"conversation": "none", "input": given}))
        assert found["code"] == "conversation_too_large"


# -- the input audio buffer -------------------------------------------------------------------------------------


def test_a_commit_makes_an_item_and_no_response() -> None:
    driver = Driver()
    driver.user("a", id="a")
    assert driver.append(60) == driver.append(60) == []
    events = driver.send("input_audio_buffer.commit")
    assert kinds(events) == COMMITTED
    assert events[0]["previous_item_id"] == "a" and events[0]["item_id"] == events[1]["item"]["id"]
    assert error_of(driver.send("input_audio_buffer.commit"))["code"] == "input_audio_buffer_commit_empty"


def test_a_commit_needs_100_ms_at_any_position_of_the_sound() -> None:
    driver, samples = Driver(), 2400
    for before in (2402, 2403, 2405, 2411):
        for count in (before, samples):
            driver.send("input_audio_buffer.append", audio=base64.b64encode(bytes(2 * count)).decode())
            assert kinds(driver.send("input_audio_buffer.commit")) == COMMITTED
    driver.send("input_audio_buffer.append", audio=base64.b64encode(bytes(2 * (samples - 1))).decode())
    assert error_of(driver.send("input_audio_buffer.commit"))["code"] == "input_audio_buffer_commit_empty"


def test_a_cleared_buffer_is_empty_and_a_full_one_refuses_sound() -> None:
    driver = Driver(limits=Limits(buffer_bytes=48 * 200))
    driver.append(150)
    assert error_of(driver.append(60))["code"] == "input_audio_buffer_full"
    assert kinds(driver.send("input_audio_buffer.clear")) == ["input_audio_buffer.cleared"]
    assert driver.append(200) == []


def test_a_turn_ends_when_the_buffer_is_full_and_the_next_turn_begins_there() -> None:
    driver = Driver(manual=False, limits=Limits(buffer_bytes=48 * 640))
    started, *ended, again, interrupted = driver.hear(736, SPOKEN)
    assert kinds(ended) == [
        "input_audio_buffer.speech_stopped",
        *COMMITTED,
        "response.created",
        "rate_limits.updated",
    ]
    assert (ended[0]["audio_end_ms"], ended[1]["item_id"]) == (640, started["item_id"])
    assert (again["type"], again["audio_start_ms"]) == ("input_audio_buffer.speech_started", 640)
    assert interrupted["type"] == "response.done"
    assert kinds(driver.hear(512, SILENT))[0] == "input_audio_buffer.speech_stopped"


def test_a_full_buffer_without_speech_loses_its_oldest_sound() -> None:
    driver = Driver(manual=False, limits=Limits(buffer_bytes=48 * 3200))
    update(driver, audio={"input": {"turn_detection": {"type": "server_vad", "idle_timeout_ms": 5000}}})
    driver.answer(driver.respond(), "Yes.", ms=700)
    (triggered, committed, *_) = driver.hear(5024, SILENT)
    assert (triggered["type"], triggered["audio_end_ms"]) == ("input_audio_buffer.timeout_triggered", 5000)
    sound = driver.session.conversation.find(committed["item_id"]).content[0].sound
    assert sound is not None and sound.ms == 3200 - 24
    assert kinds(driver.hear(96, SPOKEN))[0] == "input_audio_buffer.speech_started"


def test_sound_that_never_fits_ends_no_turn() -> None:
    driver = Driver(manual=False, limits=Limits(buffer_bytes=48 * 1600))
    driver.hear(320, SPOKEN)
    assert error_of(driver.append(1601))["code"] == "input_audio_buffer_full"
    assert kinds(driver.hear(512, SILENT))[0] == "input_audio_buffer.speech_stopped"


def test_the_format_of_sound_in_the_buffer_or_in_an_item_cannot_change() -> None:
    driver = Driver()
    driver.append(100)
    pcmu = {"input": {"format": {"type": "audio/pcmu"}}}
    assert update(driver, audio=pcmu)["error"]["param"] == "session.audio.input.format"
    driver.send("input_audio_buffer.commit")
    assert update(driver, audio=pcmu)["error"]["param"] == "session.audio.input.format", "an item has sound"
    driver.send("conversation.item.delete", item_id=driver.checker.items[0])
    assert update(driver, audio=pcmu)["session"]["audio"]["input"]["format"] == {"type": "audio/pcmu"}
    driver.send("input_audio_buffer.append", audio=base64.b64encode(b"\xff" * 800).decode())
    driver.send("input_audio_buffer.commit")
    (item,) = driver.session.conversation
    assert item.content[0].sound is not None and item.content[0].sound.ms == 100


# -- responses --------------------------------------------------------------------------------------------------


def test_null_in_a_response_is_the_value_of_the_session() -> None:
    driver = Driver()
    spoken = {"format": {"type": "audio/pcmu"}, "voice": "chelsie"}
    update(driver, instructions="Be brief.", audio={"output": spoken})
    fields = {"instructions": None, "output_modalities": None, "audio": {"output": dict.fromkeys(spoken)}}
    driver.respond(**fields)
    assert driver.generate.settings == driver.session.settings
    driver.answer(driver.generate.response_id, "Yes.", ms=100)
    driver.respond(**fields)
    assert driver.kinds()[-1] != "error", "the voice is fixed now, and stays"


def test_the_events_of_a_spoken_response() -> None:
    driver = Driver()
    driver.user("Hello", id="a")
    start = len(driver.events)
    response = driver.respond()
    driver.answer(response, "Good ", "day.", ms=200)
    events = driver.events[start:]
    assert kinds(events) == [
        "response.created",
        "rate_limits.updated",
        *BEGUN,
        *["response.output_audio_transcript.delta"] * 2,
        "response.output_audio.delta",
        "response.output_audio.done",
        "response.output_audio_transcript.done",
        *ENDED,
    ]
    done = events[-1]["response"]
    (item,) = done["output"]
    assert item["content"] == [{"type": "output_audio", "transcript": "Good day."}]
    assert (done["status"], done["status_details"], item["status"]) == ("completed", None, "completed")
    assert done["usage"]["total_tokens"] == 8
    assert driver.generate.messages == [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    driver.respond()
    assert driver.generate.messages[-1] == {"role": "assistant", "content": "Good day."}


def test_the_events_of_a_text_response() -> None:
    driver = Driver()
    start = len(driver.events)
    driver.answer(driver.respond(output_modalities=["text"], instructions="Be brief."), "Yes.")
    assert kinds(driver.events[start:]) == [
        "response.created",
        "rate_limits.updated",
        *BEGUN,
        "response.output_text.delta",
        "response.output_text.done",
        *ENDED,
    ]
    assert driver.generate.messages == [{"role": "system", "content": "Be brief."}]
    assert driver.session.settings["instructions"] == ""
    assert driver.last("response.done")["response"]["audio"] == {}


def test_function_calls_are_done_before_the_sound_has_been_sent() -> None:
    driver = Driver()
    session = driver.session
    response = driver.respond()
    driver.take(session.text(response, "One moment."))
    session.made(response, 500, last=True)
    driver.take(session.call(response, 0, "weather", ""))
    driver.take(session.call(response, 0, None, '{"city": "Bern"}'))
    driver.take(session.call(response, 1, "time", "{}"))
    assert driver.last("response.function_call_arguments.done")["name"] == "weather"
    driver.take(session.generated(response, "tool_calls", Usage()))
    assert driver.last("response.function_call_arguments.done")["arguments"] == "{}"
    assert "response.done" not in driver.kinds()
    driver.take(session.sound(response, bytes(48 * 500), 500))
    driver.take(session.drained(response))
    done = driver.last("response.done")["response"]
    assert [each["type"] for each in done["output"]] == ["message", "function_call", "function_call"]
    first, second = done["output"][1:]
    output = {"type": "function_call_output", "call_id": first["call_id"], "output": "rain"}
    driver.send("conversation.item.create", item=output)
    driver.respond()
    assistant, tool = driver.generate.messages
    assert assistant["content"] == "One moment."
    assert [call["id"] for call in assistant["tool_calls"]] == [first["call_id"], second["call_id"]]
    assert tool == {"role": "tool", "tool_call_id": first["call_id"], "content": "rain"}


@pytest.mark.parametrize("finish", ["length", "tool_calls", "stop"])
def test_a_call_that_was_cut_off_is_incomplete_and_not_in_the_next_prompt(finish: str) -> None:
    driver = Driver()
    response = driver.respond()
    driver.take(driver.session.call(response, 0, "weather", '{"ci'))
    driver.answer(response, finish=finish)
    done = driver.last("response.done")["response"]
    assert (done["status"], done["status_details"]["reason"]) == ("incomplete", "max_output_tokens")
    assert done["output"][0]["status"] == "incomplete"
    driver.respond()
    assert driver.generate.messages == []


def test_a_call_without_arguments_is_complete() -> None:
    driver = Driver()
    response = driver.respond(output_modalities=["text"])
    driver.take(driver.session.call(response, 0, "time", ""))
    driver.take(driver.session.call(response, 1, "date", ""))
    driver.answer(response, finish="tool_calls")
    done = driver.last("response.done")["response"]
    assert (done["status"], done["status_details"]) == ("completed", None)
    assert [(each["arguments"], each["status"]) for each in done["output"]] == [("{}", "completed")] * 2
    deltas = [each["delta"] for each in driver.events if each["type"] == "response.function_call_arguments.delta"]
    assert deltas == ["{}", "{}"]


@pytest.mark.parametrize("pieces", [("null",), (" nu", "ll\n")])
def test_a_call_whose_arguments_are_null_has_none(pieces: tuple[str, ...]) -> None:
    driver = Driver()
    response = driver.respond(output_modalities=["text"])
    for piece in pieces:
        assert driver.take(driver.session.call(response, 0, "time", piece))[3:] == []
    driver.take(driver.session.call(response, 1, "date", '{"a": '))
    driver.take(driver.session.call(response, 1, None, "null"))
    driver.take(driver.session.call(response, 1, None, "}"))
    driver.answer(response, finish="tool_calls")
    done = driver.last("response.done")["response"]
    shown = [(each["arguments"], each["status"]) for each in done["output"]]
    assert (done["status"], shown) == ("completed", [("{}", "completed"), ('{"a": null}', "completed")])
    deltas = [each["delta"] for each in driver.events if each["type"] == "response.function_call_arguments.delta"]
    assert deltas == ["{}", '{"a": ', "null", "}"]
    driver.respond()
    calls = driver.generate.messages[0]["tool_calls"]
    assert [each["function"]["arguments"] for each in calls] == ["{}", '{"a": null}']


@pytest.mark.parametrize(("arguments", "finish"), [("nu", "stop"), ("nu", "length"), ("null", "length")])
def test_a_call_that_was_cut_off_at_null_has_the_generated_arguments(arguments: str, finish: str) -> None:
    driver = Driver()
    response = driver.respond(output_modalities=["text"])
    driver.take(driver.session.call(response, 0, "time", arguments))
    driver.answer(response, finish=finish)
    (call,) = driver.last("response.done")["response"]["output"]
    assert (call["arguments"], call["status"]) == (arguments, "incomplete")
    assert driver.last("response.function_call_arguments.delta")["delta"] == arguments


def test_a_call_that_a_token_limit_cut_off_before_its_arguments_gets_none() -> None:
    driver = Driver()
    response = driver.respond(output_modalities=["text"])
    driver.take(driver.session.call(response, 0, "time", ""))
    driver.answer(response, finish="length")
    (call,) = driver.last("response.done")["response"]["output"]
    assert (call["arguments"], call["status"]) == ("", "incomplete")


def test_speech_that_a_call_cut_off_was_heard_as_far_as_it_was_sent() -> None:
    driver = Driver()
    response = driver.respond()
    driver.take(driver.session.text(response, "Of course, let me look up the weather in Bern for you."))
    driver.session.made(response, 500, last=False)
    driver.take(driver.session.sound(response, bytes(48), 500))
    driver.take(driver.session.call(response, 0, "weather", "{}"))
    driver.answer(response, finish="tool_calls")
    assert driver.last("response.done")["response"]["status"] == "completed"
    driver.respond()
    assert driver.generate.messages[0]["content"] == "Of course,"


def test_one_response_at_a_time_writes_to_the_conversation() -> None:
    driver = Driver(limits=Limits(responses=1))
    first = driver.respond()
    assert error_of(driver.send("response.create"))["code"] == "conversation_already_has_active_response"
    other = driver.respond(
        conversation="none",
        metadata={"topic": "x"},
        input=[{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Classify."}]}],
        output_modalities=["text"],
    )
    error = error_of(driver.send("response.create", response={"conversation": "none"}))
    assert error["code"] == "too_many_responses"
    driver.answer(other, "question")
    done = driver.last("response.done")["response"]
    assert (done["conversation_id"], done["metadata"]) == (None, {"topic": "x"})
    assert driver.generate.messages[0]["content"][0]["text"] == "Classify."
    assert driver.checker.items == []
    driver.answer(first, "Yes.", ms=100)
    assert len(driver.checker.items) == 1


def test_a_response_that_may_not_begin_is_refused_before_its_fields_are_read() -> None:
    driver = Driver(limits=Limits(responses=0))
    driver.respond()
    wrong = {"audio": {"output": {"voice": "nobody"}}}
    for own, code in (
        ({}, "conversation_already_has_active_response"),
        ({"conversation": "none"}, "too_many_responses"),
    ):
        assert error_of(driver.send("response.create", response={**wrong, **own}))["code"] == code


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_a_choice_of_tools_without_tools_is_refused(choice: Any) -> None:
    driver = Driver()
    assert error_of(driver.send("response.create", response={"tool_choice": choice}))["param"] == "response.tool_choice"
    update(driver, tool_choice=choice)
    assert error_of(driver.send("response.create"))["param"] == "response.tool_choice"
    driver.respond(tools=[{"type": "function", "name": "weather"}])
    assert driver.generate.settings["tool_choice"] == choice


def test_the_input_of_a_response_may_name_items() -> None:
    driver = Driver()
    driver.user("a", id="a")
    driver.user("b", id="b")
    driver.respond(input=[{"type": "item_reference", "id": "b"}])
    assert [each["content"][0]["text"] for each in driver.generate.messages] == ["b"]
    driver.send("response.cancel")
    error = error_of(driver.send("response.create", response={"input": [{"type": "item_reference", "id": "c"}]}))
    assert error["param"] == "response.input[0].id"
    driver.respond(input=[])
    assert driver.generate.messages == []


def test_a_cancelled_response_ends_once_and_its_late_parts_are_dropped() -> None:
    driver = Driver()
    assert error_of(driver.send("response.cancel"))["code"] == "response_cancel_not_active"
    response = driver.respond()
    driver.take(driver.session.text(response, "Once upon a time there was a king who had a castle."))
    driver.session.made(response, 3000, last=False)
    driver.take(driver.session.sound(response, bytes(48), 500))
    events = driver.send("response.cancel", response_id=response)
    assert kinds(events)[-1] == "response.done"
    done = events[-1]["response"]
    assert (done["status"], done["status_details"]) == (
        "cancelled",
        {"type": "cancelled", "reason": "client_cancelled"},
    )
    assert driver.aborted() == [response]
    assert driver.session.text(response, "more") == driver.session.sound(response, b"", 0) == []
    assert driver.session.drained(response) == driver.session.failed(response, "x", kind="y", code="z") == []
    driver.respond()
    (kept,) = driver.generate.messages
    assert kept["content"] == "Once"


def test_an_error_of_the_model_fails_the_response() -> None:
    driver = Driver()
    response = driver.respond()
    driver.take(driver.session.failed(response, "no", kind="server_error", code="engine_error"))
    done = driver.last("response.done")["response"]
    assert done["status"] == "failed"
    assert done["status_details"]["error"] == {"type": "server_error", "code": "engine_error", "message": "no"}
    driver.respond()


def test_an_item_of_the_response_in_progress_cannot_be_deleted() -> None:
    driver = Driver()
    response = driver.respond()
    driver.take(driver.session.text(response, "Yes"))
    (item,) = driver.checker.items
    assert error_of(driver.send("conversation.item.delete", item_id=item))["code"] == "item_in_progress"
    driver.answer(response, ".")
    driver.send("conversation.item.delete", item_id=item)
    assert driver.checker.items == []


def test_a_draining_server_begins_no_response() -> None:
    driver = Driver()
    error = error_of(driver.take(driver.session.drain()))
    assert (error["type"], error["code"]) == ("server_error", "server_shutting_down")
    assert error_of(driver.send("response.create"))["code"] == "server_shutting_down"


def test_each_refusal_of_a_draining_server_is_an_own_error() -> None:
    driver = Driver()
    driver.session.drain()
    raised = []
    for _ in range(2):
        with pytest.raises(ClientError, match="shutting down") as caught:
            driver.session._create_response(None)
        raised.append(caught.value)
    assert raised[0] is not raised[1], "an exception that is raised again keeps the frames of all its tracebacks"


# -- truncation -------------------------------------------------------------------------------------------------


def test_the_model_gets_the_part_of_a_truncated_sound_that_was_heard() -> None:
    driver = Driver()
    driver.answer(driver.respond(), "one two three four five", ms=1000)
    (item,) = driver.checker.items
    error = error_of(driver.send("conversation.item.truncate", item_id=item, content_index=0, audio_end_ms=1001))
    assert error["param"] == "audio_end_ms"
    (event,) = driver.send("conversation.item.truncate", item_id=item, content_index=0, audio_end_ms=500)
    assert (event["type"], event["audio_end_ms"]) == ("conversation.item.truncated", 500)
    driver.respond()
    assert driver.generate.messages == [{"role": "assistant", "content": "one two"}]
    (found,) = driver.send("conversation.item.retrieve", item_id=item)
    assert found["item"]["content"][0]["transcript"] == "one two"


def test_a_truncated_length_may_be_rounded_up() -> None:
    driver = Driver()
    driver.answer(driver.respond(), "one two", ms=1000.4)
    (item,) = driver.checker.items
    (event,) = driver.send("conversation.item.truncate", item_id=item, content_index=0, audio_end_ms=1001)
    assert (event["type"], event["audio_end_ms"]) == ("conversation.item.truncated", 1000)
    error = error_of(driver.send("conversation.item.truncate", item_id=item, content_index=0, audio_end_ms=1002))
    assert error["param"] == "audio_end_ms"


def test_only_sound_of_the_assistant_can_be_truncated() -> None:
    driver = Driver()
    driver.user("a", id="a")
    for index in (0, 1):
        events = driver.send("conversation.item.truncate", item_id="a", content_index=index, audio_end_ms=0)
        assert error_of(events)["param"] == "content_index"


def test_a_transcript_that_a_client_has_created_may_be_truncated_to_nothing() -> None:
    driver = Driver()
    parts = [{"type": "output_audio", "transcript": "one two"}]
    driver.send("conversation.item.create", item={"type": "message", "role": "assistant", "content": parts, "id": "a"})
    driver.send("conversation.item.truncate", item_id="a", content_index=0, audio_end_ms=0)
    assert driver.kinds()[-1] == "conversation.item.truncated"
    driver.respond()
    assert driver.generate.messages == []


def test_a_truncated_part_is_named_by_its_index() -> None:
    driver = Driver()
    parts = [{"type": "output_audio", "transcript": text} for text in "ab"]
    item = {"type": "message", "role": "assistant", "content": parts, "id": "a"}
    driver.send("conversation.item.create", item=item)
    (event,) = driver.send("conversation.item.truncate", item_id="a", content_index=1, audio_end_ms=0)
    assert (event["type"], event["content_index"]) == ("conversation.item.truncated", 1)


@pytest.mark.parametrize("truncation", ["auto", {"type": "retention_ratio", "retention_ratio": 0.4}])
def test_a_prompt_that_is_too_long_loses_its_oldest_items(truncation: Any) -> None:
    driver = Driver()
    update(driver, truncation=truncation)
    for name in "abcde":
        driver.user(name * 100, id=name)
    response = driver.respond()
    driver.take(driver.session.shorten(response))
    left = [each["content"][0]["text"][0] for each in driver.generate.messages]
    assert left == (["b", "c", "d", "e"] if truncation == "auto" else ["d", "e"])
    assert driver.checker.items == list("abcde")
    driver.answer(response, "Yes.")
    driver.respond()
    assert [each["content"][0]["text"][0] for each in driver.generate.messages[:-1]] == left


@pytest.mark.parametrize("first", [{"type": "item_reference", "id": "a"}, {"id": "a"}])
def test_a_shortened_input_of_a_response_drops_nothing_from_later_prompts(first: dict[str, Any]) -> None:
    driver = Driver()
    driver.user("a", id="a")
    driver.user("b", id="b")
    text = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x" * 100}]}
    given = [first if "type" in first else {**text, **first}, text, text]
    response = driver.respond(conversation="none", output_modalities=["text"], input=given)
    driver.take(driver.session.shorten(response))
    assert len(driver.generate.messages) < len(given)
    driver.answer(response, "Yes.")
    driver.respond()
    assert [each["content"][0]["text"] for each in driver.generate.messages] == ["a", "b"]


def test_an_item_that_was_deleted_before_its_prompt_was_shortened_may_be_created_again() -> None:
    driver = Driver()
    for name in ("first", "second"):
        driver.user("word " * 100, id=name)
    response = driver.respond()
    driver.send("conversation.item.delete", item_id="first")
    driver.take(driver.session.shorten(response))
    driver.answer(response, "Yes.")
    driver.user("Back", id="first")
    driver.respond()
    assert driver.generate.messages[-1]["content"][0]["text"] == "Back"


def test_a_prompt_is_not_shortened_below_its_last_item_or_if_truncation_is_off() -> None:
    driver = Driver()
    driver.user("a")
    assert driver.session.shorten(driver.respond()) == []
    driver.send("response.cancel")
    driver.user("b")
    update(driver, truncation="disabled")
    assert driver.session.shorten(driver.respond()) == []


# -- turns ------------------------------------------------------------------------------------------------------


def test_a_turn_is_committed_and_answered() -> None:
    driver = Driver(manual=False)
    driver.hear(1600, SILENT)
    started = driver.hear(640, SPOKEN)
    assert kinds(started) == ["input_audio_buffer.speech_started"]
    assert started[0]["audio_start_ms"] == 1300
    stopped = driver.hear(640, SILENT)
    assert kinds(stopped) == [
        "input_audio_buffer.speech_stopped",
        *COMMITTED,
        "response.created",
        "rate_limits.updated",
    ]
    assert stopped[0]["audio_end_ms"] == 2240 + 500
    assert started[0]["item_id"] == stopped[0]["item_id"] == stopped[1]["item_id"]
    (item,) = driver.session.conversation
    assert item.content[0].sound is not None and item.content[0].sound.ms == 2740 - 1300


def test_sound_before_a_turn_is_not_kept() -> None:
    driver = Driver(manual=False)
    driver.hear(60_000, SILENT)
    assert driver.session.buffer.end_ms - driver.session.buffer.start_ms < 400


def test_speech_interrupts_the_response_and_truncates_it_where_it_was_played() -> None:
    driver = Driver(manual=False)
    response = driver.respond()
    session = driver.session
    driver.take(session.text(response, "one two three four five six"))
    session.made(response, 2000, last=True)
    driver.take(session.sound(response, bytes(48 * 800), 800))
    driver.playback.played[response] = 600
    events = driver.hear(96, SPOKEN)
    assert kinds(events)[0] == "input_audio_buffer.speech_started"
    assert kinds(events)[-2:] == ["response.done", "conversation.item.truncated"]
    assert events[-2]["response"]["status_details"]["reason"] == "turn_detected"
    assert events[-1]["audio_end_ms"] == 600
    assert driver.aborted() == [response]
    driver.hear(640, SILENT)
    assert driver.generate.messages[0] == {"role": "assistant", "content": "one two"}
    item = events[-1]["item_id"]
    driver.send("conversation.item.truncate", item_id=item, content_index=0, audio_end_ms=700)
    assert driver.kinds()[-1] == "conversation.item.truncated"


def test_speech_after_the_response_truncates_sound_that_is_still_played() -> None:
    driver = Driver(manual=False)
    response = driver.respond()
    driver.answer(response, "one two", ms=300)
    driver.playback.played[response] = 100
    assert kinds(driver.hear(96, SPOKEN)) == ["input_audio_buffer.speech_started", "conversation.item.truncated"]


def test_speech_after_an_answer_that_was_played_truncates_nothing() -> None:
    driver, pacer = Driver(manual=False), Pacer()
    response = driver.respond()
    driver.take(driver.session.text(response, "one two"))
    driver.session.made(response, 1000, last=True)
    for at in range(10):
        pacer.sent(100, at / 10)
        driver.take(driver.session.sound(response, bytes(4800), 100))
    driver.answer(response)
    driver.playback.played[response] = pacer.played_ms(60.0)
    assert kinds(driver.hear(96, SPOKEN)) == ["input_audio_buffer.speech_started"]
    driver.hear(640, SILENT)
    assert driver.generate.messages[0] == {"role": "assistant", "content": "one two"}


def test_speech_truncates_no_sound_of_which_less_than_a_millisecond_is_unplayed() -> None:
    driver = Driver(manual=False)
    response = driver.respond()
    driver.answer(response, "one two", ms=300)
    driver.playback.played[response] = 299.5
    assert kinds(driver.hear(96, SPOKEN)) == ["input_audio_buffer.speech_started"]


def test_without_interruption_the_response_goes_on_and_the_turn_gets_no_other() -> None:
    driver = Driver(manual=False)
    update(driver, audio={"input": {"turn_detection": {"type": "server_vad", "interrupt_response": False}}})
    response = driver.respond()
    driver.hear(96, SPOKEN)
    events = driver.hear(640, SILENT)
    assert kinds(events) == ["input_audio_buffer.speech_stopped", *COMMITTED, "error"]
    assert driver.aborted() == []
    driver.answer(response, "Yes.", ms=100)


def test_a_turn_without_create_response_is_only_committed() -> None:
    driver = Driver(manual=False)
    update(driver, audio={"input": {"turn_detection": {"type": "server_vad", "create_response": False}}})
    driver.hear(96, SPOKEN)
    assert kinds(driver.hear(640, SILENT)) == ["input_audio_buffer.speech_stopped", *COMMITTED]


def test_an_update_within_a_turn_that_changes_no_detection_keeps_the_turn() -> None:
    driver = Driver(manual=False)
    (started,) = driver.hear(320, SPOKEN)
    commands = len(driver.commands)
    changes = {"type": "server_vad", "create_response": False, "interrupt_response": False}
    update(driver, audio={"input": {"turn_detection": changes}})
    assert not [each for each in driver.commands[commands:] if isinstance(each, Detection | Detect)]
    (stopped, *others) = driver.hear(640, SILENT)
    assert kinds([stopped, *others]) == ["input_audio_buffer.speech_stopped", *COMMITTED]
    assert stopped["item_id"] == started["item_id"]


def test_other_settings_of_detection_keep_the_turn() -> None:
    driver = Driver(manual=False)
    (started,) = driver.hear(320, SPOKEN)
    commands = len(driver.commands)
    update(driver, audio={"input": {"turn_detection": {"type": "server_vad", "silence_duration_ms": 900}}})
    assert not [each for each in driver.commands[commands:] if isinstance(each, Detection | Detect)]
    assert driver.hear(320, SPOKEN) == driver.hear(640, SILENT) == []
    (stopped, *others) = driver.hear(320, SILENT)
    assert (stopped["type"], stopped["audio_end_ms"]) == ("input_audio_buffer.speech_stopped", 640 + 900)
    assert kinds(others)[:3] == COMMITTED and stopped["item_id"] == started["item_id"]
    (item,) = driver.session.conversation
    assert item.content[0].sound is not None and item.content[0].sound.ms == 640 + 900


def test_a_turn_in_which_detection_is_turned_off_is_committed_as_its_item() -> None:
    driver = Driver(manual=False)
    (started,) = driver.hear(320, SPOKEN)
    update(driver, audio={"input": {"turn_detection": None}})
    events = driver.send("input_audio_buffer.commit")
    assert kinds(events) == COMMITTED and events[0]["item_id"] == started["item_id"]
    driver.append(100)
    assert driver.send("input_audio_buffer.commit")[0]["item_id"] != started["item_id"]


def test_a_turn_goes_on_when_detection_is_turned_off_and_on_again() -> None:
    driver = Driver(manual=False)
    driver.hear(960, SILENT)
    (started,) = driver.hear(320, SPOKEN)
    update(driver, audio={"input": {"turn_detection": None}})
    driver.append(320)
    update(driver, audio={"input": {"turn_detection": {"type": "server_vad"}}})
    begin = started["audio_start_ms"]
    assert driver.detection().from_ms == begin == 660
    assert isinstance(driver.commands[-1], Detect) and len(driver.commands[-1].data) == 48 * (1600 - begin)
    again = [(1280.0, SPOKEN), (1600.0, SILENT)]
    assert driver.take(driver.session.frames(again)) == []
    driver.ms = 1600.0
    (stopped, *others) = driver.hear(320, SILENT)
    assert (stopped["type"], stopped["audio_end_ms"]) == ("input_audio_buffer.speech_stopped", 1280 + 500)
    assert kinds(others)[:3] == COMMITTED and stopped["item_id"] == others[0]["item_id"] == started["item_id"]
    (item,) = driver.session.conversation
    assert item.content[0].sound is not None and item.content[0].sound.ms == 1780 - begin


def test_a_turn_that_was_committed_while_detection_was_off_does_not_go_on() -> None:
    driver = Driver(manual=False)
    driver.hear(320, SPOKEN)
    update(driver, audio={"input": {"turn_detection": None}})
    driver.send("input_audio_buffer.commit")
    update(driver, audio={"input": {"turn_detection": {"type": "server_vad"}}})
    assert driver.hear(1600, SILENT) == []


def test_a_commit_within_a_turn_ends_it() -> None:
    driver = Driver(manual=False)
    (started,) = driver.hear(320, SPOKEN)
    events = driver.send("input_audio_buffer.commit")
    assert kinds(events) == COMMITTED and events[0]["item_id"] == started["item_id"]
    assert driver.hear(1000, SILENT) == []


def test_silence_after_an_answer_is_committed_and_answered() -> None:
    driver = Driver(manual=False)
    update(driver, audio={"input": {"turn_detection": {"type": "server_vad", "idle_timeout_ms": 5000}}})
    response = driver.respond()
    driver.playback.remaining[response] = 640
    driver.answer(response, "Yes.", ms=700)
    events = driver.hear(6000, SILENT)
    assert kinds(events) == [
        "input_audio_buffer.timeout_triggered",
        *COMMITTED,
        "response.created",
        "rate_limits.updated",
    ]
    assert (events[0]["audio_start_ms"], events[0]["audio_end_ms"]) == (640, 5640)
    sound = driver.session.conversation.find(events[0]["item_id"]).content[0].sound
    assert sound is not None and sound.ms == 5000


def test_the_silence_after_an_answer_goes_on_when_detection_gets_other_settings() -> None:
    driver = Driver(manual=False)
    update(driver, audio={"input": {"turn_detection": {"type": "server_vad", "idle_timeout_ms": 5000}}})
    driver.answer(driver.respond(), "Yes.", ms=700)
    driver.hear(1600, SILENT)
    update(driver, audio={"input": {"turn_detection": {"type": "server_vad", "threshold": 0.6}}})
    (event, *_) = driver.hear(3520, SILENT)
    assert event["type"] == "input_audio_buffer.timeout_triggered"
    assert (event["audio_start_ms"], event["audio_end_ms"]) == (0, 5000)


# -- transcripts of input sound ---------------------------------------------------------------------------------


def test_committed_sound_is_transcribed() -> None:
    driver = Driver()
    update(driver, audio={"input": {"transcription": {"model": "whisper-1", "language": "en"}}})
    driver.append(100)
    driver.send("input_audio_buffer.commit")
    (command,) = (each for each in driver.commands if isinstance(each, Transcribe))
    assert command.settings == {"model": "tiny", "language": "en", "prompt": None}
    driver.take(driver.session.transcript(command.item_id, "Hel"))
    driver.take(driver.session.transcribed(command.item_id, "Hello", Usage(prompt=9, prompt_audio=4, text=2)))
    completed = driver.events[-1]
    assert completed["transcript"] == "Hello" and completed["usage"]["total_tokens"] == 11
    assert driver.session.transcribed(command.item_id, "Hello", Usage()) == []
    (item,) = driver.send("conversation.item.retrieve", item_id=command.item_id)
    assert item["item"]["content"][0]["transcript"] == "Hello"


def test_a_failed_transcription_and_one_of_a_deleted_item() -> None:
    driver = Driver()
    update(driver, audio={"input": {"transcription": {}}})
    for _ in range(2):
        driver.append(100)
        driver.send("input_audio_buffer.commit")
    first, second = driver.checker.items
    driver.take(driver.session.not_transcribed(first, "no", kind="server_error", code="engine_error"))
    assert driver.kinds()[-1] == "conversation.item.input_audio_transcription.failed"
    driver.send("conversation.item.delete", item_id=second)
    assert driver.commands[-1] == StopTranscribing(item_id=second)
    assert driver.session.transcript(second, "a") == []


# -- a conversation that a client restores ----------------------------------------------------------------------


def test_retrieved_items_restore_a_conversation_in_another_session() -> None:
    driver = Driver()
    update(driver, audio={"input": {"transcription": {}}})
    system = {"type": "message", "role": "system", "content": [{"type": "input_text", "text": "Be brief."}]}
    driver.send("conversation.item.create", item=system)
    driver.append(150)
    driver.send("input_audio_buffer.commit")
    driver.take(driver.session.transcribed(driver.checker.items[-1], "Hello", Usage()))
    driver.answer(driver.respond(), "one two three four", ms=1000)
    spoken = driver.checker.items[-1]
    driver.send("conversation.item.truncate", item_id=spoken, content_index=0, audio_end_ms=500)
    driver.user("And you?")
    response = driver.respond(output_modalities=["text"])
    driver.take(driver.session.text(response, "I look."))
    driver.take(driver.session.call(response, 0, "weather", "{}"))
    driver.answer(response)
    call = driver.last("response.function_call_arguments.done")["call_id"]
    output = {"type": "function_call_output", "call_id": call, "output": "rain"}
    driver.send("conversation.item.create", item=output)
    driver.respond()
    expected = driver.generate.messages

    other = Driver()
    for item_id in driver.checker.items:
        (retrieved,) = driver.send("conversation.item.retrieve", item_id=item_id)
        added, _ = other.send("conversation.item.create", item=retrieved["item"])
        assert added["item"]["id"] == item_id
    other.respond()
    assert other.generate.messages == expected
    assert [part["role"] for part in expected] == ["system", "user", "assistant", "user", "assistant", "tool"]
    assert expected[2]["content"] == "one two"


class Talk:
    """The methods of the official client's connection that docs/realtime.md calls, on a session without sockets."""

    def __init__(self) -> None:
        self.driver = Driver()
        self.seen = len(self.driver.events)
        self.session = self.conversation = self.item = self

    async def update(self, *, session: dict[str, Any]) -> None:
        update(self.driver, **session)

    async def retrieve(self, *, item_id: str) -> None:
        self.driver.send("conversation.item.retrieve", item_id=item_id)

    async def create(self, *, item: dict[str, Any]) -> None:
        assert kinds(self.driver.send("conversation.item.create", item=item))[0] == "conversation.item.added"

    async def read(self, page: SimpleNamespace) -> None:
        """Pass the events since the last call to the documented function."""
        while self.seen < len(self.driver.events):
            self.seen += 1
            await page.keep(self, check_type(self.driver.events[self.seen - 1]))

    def prompt(self) -> list[dict[str, Any]]:
        response = self.driver.respond(output_modalities=["text"])
        self.driver.send("response.cancel", response_id=response)
        return self.driver.generate.messages


async def test_the_documented_functions_restore_a_conversation() -> None:
    text = (Path(__file__).parents[3] / "docs" / "realtime.md").read_text(encoding="utf-8")
    (code,) = (each for each in re.findall("```python\n(.*?)```", text, re.DOTALL) if "def restore" in each)
    names: dict[str, Any] = {}
    exec(code, names)
    page, talk = SimpleNamespace(**names), Talk()
    driver, session = talk.driver, talk.driver.session
    driver.user("How is the weather?", id="first")
    response = driver.respond()
    driver.take(session.text(response, "One moment."))
    driver.take(session.call(response, 0, "weather", "{}"))
    session.made(response, 100, last=True)
    driver.take(session.generated(response, "tool_calls", Usage()))  # the call is done, the sound is not sent yet
    await talk.read(page)
    driver.take(session.sound(response, bytes(4800), 100))
    driver.take(session.drained(response))
    call = driver.last("response.function_call_arguments.done")["call_id"]
    driver.send("conversation.item.create", item={"type": "function_call_output", "call_id": call, "output": "rain"})
    for arguments in ("{}", '{"a":'):  # calls that are cut off
        response = driver.respond(output_modalities=["text"])
        driver.take(session.call(response, 0, "weather", arguments))
        driver.send("response.cancel")
    driver.user("Deleted", id="deleted")
    driver.user("Hello", id="hello")
    driver.send("conversation.item.delete", item_id="deleted")
    greeting = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}
    driver.send("conversation.item.create", item=greeting, previous_item_id="first")
    await talk.read(page)
    expected = talk.prompt()
    driver.take(session.text(driver.respond(), "This is in progress"))
    await talk.read(page)

    for _ in range(2):  # the new session is lost too
        talk = Talk()
        await page.restore(talk, {"type": "realtime", "instructions": ""})
        await talk.read(page)
        assert talk.prompt() == expected
    assert [each["role"] for each in expected] == ["user", "user", "assistant", "tool", "user"]
    assert expected[2]["content"] == "One moment." and expected[2]["tool_calls"]
