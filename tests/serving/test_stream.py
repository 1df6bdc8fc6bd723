"""Streamed answers of the chat endpoint."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import av
import openai
import pytest
import soundfile

from tests.serving.conftest import MODEL, asking
from tests.serving.test_reply import HELLO, TWO_PIECES, ask, expected_sound
from tests.support.scripted import RATE, ScriptedOmni, sound
from vllm_omni_ext.modalities.sound import pcm16
from vllm_omni_ext.orchestrator.admission import Ticket

pytestmark = pytest.mark.asyncio(loop_scope="session")

PCM = {"voice": "ethan", "format": "pcm16"}


async def chunks(client: openai.AsyncOpenAI, **fields: Any) -> list[Any]:
    fields = {"model": MODEL, "messages": HELLO, "stream": True, "audio": PCM, **fields}
    return [chunk async for chunk in await client.chat.completions.create(**fields)]


async def events(app: Any, body: dict[str, Any]) -> list[str]:
    """Return the data of all events."""
    async with asking(app) as http:
        response = await http.post("/v1/chat/completions", json={"messages": HELLO, "stream": True, **body})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]


def audio_deltas(received: list[Any]) -> list[Any]:
    return [chunk.choices[0].delta.audio for chunk in received if chunk.choices and chunk.choices[0].delta.audio]


def data_of(received: list[Any]) -> list[str]:
    return [audio.data for audio in audio_deltas(received) if audio.data]


async def test_text_and_sound_are_streamed_and_the_finish_reason_is_last(
    client: openai.AsyncOpenAI, engine: ScriptedOmni
) -> None:
    engine.script = TWO_PIECES
    received = await chunks(client, stream_options={"include_usage": True})
    assert engine.calls[0].options is not None and engine.calls[0].options.streamed
    deltas = [chunk.choices[0].delta for chunk in received[:-1]]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == "blue cat"
    assert "".join(audio.transcript or "" for audio in audio_deltas(received)) == "blue cat"
    assert b"".join(map(base64.b64decode, data_of(received))) == pcm16(expected_sound())
    order = [_kind(chunk) for chunk in received]
    assert order == ["text", "text", "data", "text", "data", "expires", "finish", "usage"]
    assert received[-1].usage.completion_tokens_details.audio_tokens == 5
    assert (received[-1].usage.completion_tokens, received[-1].usage.total_tokens) == (2 + 5, 10)
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in received}) == 1
    facts = [chunk.choices[0].audio_metadata for chunk in received if _kind(chunk) == "data"]
    assert facts[0] == {"format": "pcm16", "sample_rate_hz": RATE, "frame_count": 300, "channels": 1}
    assert engine.calls[0].closed


def _kind(chunk: Any) -> str:
    if not chunk.choices:
        return "usage"
    choice = chunk.choices[0]
    if choice.finish_reason:
        return "finish"
    if choice.delta.audio and choice.delta.audio.expires_at:
        return "expires"
    return "data" if choice.delta.audio and choice.delta.audio.data else "text"


async def test_each_chunk_names_its_modality(app: Any, engine: ScriptedOmni) -> None:
    engine.script = TWO_PIECES
    lines = await events(app, {"stream_options": {"include_usage": True}})
    *received, usage = [json.loads(line) for line in lines[:-1]]
    for chunk in received:
        assert chunk["modality"] == ("audio" if "audio_metadata" in chunk["choices"][0] else "text")
    assert "modality" not in usage


async def test_sound_alone_has_a_transcript_and_no_text(app: Any, engine: ScriptedOmni) -> None:
    for script, transcript in ((TWO_PIECES, "blue cat"), ([sound(0, finished=True, note="too short"), "no"], "no")):
        engine.script = script
        lines = await events(app, {"modalities": ["audio"], "audio": PCM})
        assert lines[-1] == "[DONE]"
        choices = [json.loads(line)["choices"][0] for line in lines[:-1]]
        spoken = [(choice["delta"].get("audio") or {}).get("transcript") or "" for choice in choices]
        assert "".join(spoken) == transcript
        assert not any(choice["delta"].get("content") for choice in choices)
        assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["stop"]
    assert [choice["audio_metadata"]["note"] for choice in choices if "audio_metadata" in choice] == ["too short"]


@pytest.mark.parametrize("name", ["wav", "pcm16"])
async def test_content_has_the_sound_if_requested(app: Any, engine: ScriptedOmni, name: str) -> None:
    engine.script = TWO_PIECES
    body = {"audio": {"voice": "ethan", "format": name}, "audio_in_content": True}
    received = [json.loads(line) for line in (await events(app, body))[:-1]]
    deltas = [(chunk["modality"], chunk["choices"][0]["delta"]) for chunk in received]
    pieces = [base64.b64decode(delta["content"]) for kind, delta in deltas if kind == "audio" and "content" in delta]
    if name == "wav":
        pieces = [soundfile.read(io.BytesIO(piece), dtype="int16")[0].tobytes() for piece in pieces]
    assert len(pieces) == 2 and b"".join(pieces) == pcm16(expected_sound())
    assert "".join(delta.get("content", "") for kind, delta in deltas if kind == "text") == "blue cat"
    whole = base64.b64decode("".join(delta.get("audio", {}).get("data", "") for _, delta in deltas))
    if name == "wav":
        whole = soundfile.read(io.BytesIO(whole), dtype="int16")[0].tobytes()
    assert whole == pcm16(expected_sound())


@pytest.mark.parametrize("name", ["flac", "mp3", "opus", "aac"])
async def test_files_are_streamed(client: openai.AsyncOpenAI, engine: ScriptedOmni, name: str) -> None:
    engine.script = TWO_PIECES
    received = await chunks(client, audio={"voice": "ethan", "format": name})
    data = b"".join(map(base64.b64decode, data_of(received)))
    with av.open(io.BytesIO(data)) as file:
        assert sum(frame.samples / frame.rate for frame in file.decode(audio=0)) >= len(expected_sound()) / RATE


async def test_text_alone_is_vllms_stream(app: Any, engine: ScriptedOmni) -> None:
    engine.script = ["blue ", "cat"]
    lines = await events(app, {"modalities": ["text"]})
    assert lines[-1] == "[DONE]"
    bodies = [json.loads(line) for line in lines[:-1]]
    assert [body["choices"][0]["delta"] for body in bodies] == [
        {"role": "assistant", "content": ""},
        {"content": "blue "},
        {"content": "cat"},
    ]
    assert bodies[-1]["choices"][0]["finish_reason"] == "stop"


async def test_the_official_client_accumulates_the_stream(client: openai.AsyncOpenAI, engine: ScriptedOmni) -> None:
    engine.script = TWO_PIECES
    async with client.chat.completions.stream(model=MODEL, messages=HELLO, audio=PCM) as stream:
        message = (await stream.get_final_completion()).choices[0].message
    assert message.content == message.audio.transcript == "blue cat"
    assert base64.b64decode(message.audio.data) == pcm16(expected_sound())
    assert message.audio.id.count("audio-") == 1
    assert message.audio.expires_at < 1 << 33


TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
CALL = ["<tool_call>", '{"name": "look", ', '"arguments": {}}', "</tool_call>"]


async def test_a_tool_call_is_not_spoken(client: openai.AsyncOpenAI, engine: ScriptedOmni) -> None:
    engine.script = [CALL[0], sound(300), *CALL[1:], sound(300), sound(299, finished=True)]
    received = await chunks(client, tools=TOOLS, stream_options={"include_usage": True})
    assert [_kind(chunk) for chunk in received if _kind(chunk) != "text"] == ["finish", "usage"]
    assert received[-2].choices[0].finish_reason == "tool_calls"
    assert received[-1].usage.completion_tokens_details.audio_tokens == 0
    assert engine.calls[0].text_only and engine.calls[0].closed


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_call_ends_the_sound_of_its_own_request(
    client: openai.AsyncOpenAI, engine: ScriptedOmni, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    ended: list[Any] = []

    async def text_only(ticket: Ticket) -> None:
        ended.append(ticket.options)

    monkeypatch.setattr(engine, "text_only", text_only)
    engine.script = [*CALL, sound(299, finished=True)]
    await (chunks if stream else ask)(client, tools=TOOLS, extra_headers={"X-Request-Id": "trace"})
    assert len(ended) == 1 and ended[0] is engine.calls[0].options


async def test_sound_before_a_tool_call_is_sent(client: openai.AsyncOpenAI, engine: ScriptedOmni) -> None:
    engine.script = ["Wait. ", sound(300), *CALL, sound(299, finished=True)]
    received = await chunks(client, tools=TOOLS)
    assert [_kind(chunk) for chunk in received if _kind(chunk) != "text"] == ["data", "expires", "finish"]
    assert b"".join(map(base64.b64decode, data_of(received))) == pcm16(sound(300).samples)


async def test_an_answer_without_a_tool_call_is_spoken(client: openai.AsyncOpenAI, engine: ScriptedOmni) -> None:
    engine.script = TWO_PIECES
    received = await chunks(client, tools=TOOLS)
    assert b"".join(map(base64.b64decode, data_of(received))) == pcm16(expected_sound())
    assert not engine.calls[0].text_only
