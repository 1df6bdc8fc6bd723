"""Streamed answers of the chat endpoint."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import soundfile

from tests.serving.conftest import MODEL
from tests.serving.test_reply import HELLO, TWO_PIECES, expected_sound
from tests.support.scripted import RATE, ScriptedOmni, sound
from vllm_omni_ext.modalities.sound import pcm16

pytestmark = pytest.mark.asyncio(loop_scope="session")

PCM = {"voice": "ethan", "format": "pcm16"}


async def chunks(client: openai.AsyncOpenAI, **fields: Any) -> list[Any]:
    fields = {"model": MODEL, "messages": HELLO, "stream": True, "audio": PCM, **fields}
    return [chunk async for chunk in await client.chat.completions.create(**fields)]


async def events(app: Any, body: dict[str, Any]) -> list[str]:
    """The raw data lines."""
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://server") as http:
        response = await http.post("/v1/chat/completions", json={"messages": HELLO, "stream": True, **body})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]


def audio_deltas(received: list[Any]) -> list[Any]:
    return [chunk.choices[0].delta.audio for chunk in received if chunk.choices and chunk.choices[0].delta.audio]


def data_of(received: list[Any]) -> list[str]:
    return [audio.data for audio in audio_deltas(received) if audio.data]


async def test_text_and_sound(client: openai.AsyncOpenAI, engine: ScriptedOmni) -> None:
    engine.script = TWO_PIECES
    received = await chunks(client, stream_options={"include_usage": True})
    deltas = [chunk.choices[0].delta for chunk in received[:-1]]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == "blue cat"
    assert "".join(audio.transcript or "" for audio in audio_deltas(received)) == "blue cat"
    assert b"".join(map(base64.b64decode, data_of(received))) == pcm16(expected_sound())
    order = [_kind(chunk) for chunk in received]
    assert order == ["text", "text", "data", "text", "data", "expires", "finish", "usage"]
    assert received[-1].usage.completion_tokens_details.audio_tokens == 5
    assert received[-1].usage.completion_tokens == 2
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


async def test_pieces_add_up_in_every_way(client: openai.AsyncOpenAI, engine: ScriptedOmni) -> None:
    sizes = [1, 2, 100, 3, 7, 1000, 5]
    pieces = [sound(size, frames=i + 1, finished=i + 1 == len(sizes)) for i, size in enumerate(sizes)]
    engine.script = ["a", "b", *pieces]
    data = data_of(await chunks(client))
    whole = pcm16(np.concatenate([piece.samples for piece in pieces]))
    assert base64.b64decode("".join(data)) == whole
    assert all(len(base64.b64decode(piece)) % 2 == 0 for piece in data)


async def test_wav_is_one_file(client: openai.AsyncOpenAI, engine: ScriptedOmni) -> None:
    engine.script = TWO_PIECES
    data = data_of(await chunks(client, audio={"voice": "ethan", "format": "wav"}))
    samples, rate = soundfile.read(io.BytesIO(base64.b64decode("".join(data))), dtype="int16")
    assert (rate, samples.tobytes()) == (RATE, pcm16(expected_sound()))


async def test_sound_alone(client: openai.AsyncOpenAI, engine: ScriptedOmni) -> None:
    engine.script = TWO_PIECES
    received = await chunks(client, modalities=["audio"])
    assert all(chunk.choices[0].delta.content is None for chunk in received)
    assert "".join(audio.transcript or "" for audio in audio_deltas(received)) == "blue cat"
    assert [chunk.choices[0].finish_reason for chunk in received if chunk.choices[0].finish_reason] == ["stop"]


async def test_chunks_say_what_they_carry(app: Any, engine: ScriptedOmni) -> None:
    """As vllm-omni's do."""
    engine.script = TWO_PIECES
    lines = await events(app, {"stream_options": {"include_usage": True}})
    *chunks_, usage = [json.loads(line) for line in lines[:-1]]
    for chunk in chunks_:
        assert chunk["modality"] == ("audio" if "audio_metadata" in chunk["choices"][0] else "text")
    assert "modality" not in usage
    engine.script = ["a", "b"]
    lines = await events(app, {"modalities": ["text"]})
    assert {json.loads(line)["modality"] for line in lines[:-1]} == {"text"}


@pytest.mark.parametrize("name", ["wav", "pcm16"])
async def test_sound_in_content_if_asked_for(app: Any, engine: ScriptedOmni, name: str) -> None:
    engine.script = TWO_PIECES
    body = {"audio": {"voice": "ethan", "format": name}, "audio_in_content": True}
    chunks_ = [json.loads(line) for line in (await events(app, body))[:-1]]
    heard = []
    for chunk in chunks_:
        delta = chunk["choices"][0]["delta"]
        if chunk["modality"] == "audio" and "content" in delta:
            data = base64.b64decode(delta["content"])
            heard.append(wav_samples(data) if name == "wav" else data)
    assert b"".join(heard) == pcm16(expected_sound())
    assert len(heard) == 2
    text = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks_ if chunk["modality"] == "text"]
    assert "".join(text) == "blue cat"
    data = [chunk["choices"][0]["delta"].get("audio", {}).get("data", "") for chunk in chunks_]
    assert base64.b64decode("".join(data)).endswith(pcm16(expected_sound()))


def wav_samples(data: bytes) -> bytes:
    samples, rate = soundfile.read(io.BytesIO(data), dtype="int16")
    assert rate == RATE
    return samples.tobytes()


async def test_text_alone_is_stock(app: Any, engine: ScriptedOmni) -> None:
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


async def test_too_short_to_speak(app: Any, engine: ScriptedOmni) -> None:
    engine.script = [sound(0, finished=True, note="too short"), "no"]
    lines = await events(app, {})
    assert lines[-1] == "[DONE]"
    choices = [json.loads(line)["choices"][0] for line in lines[:-1]]
    assert [choice["audio_metadata"]["note"] for choice in choices if "audio_metadata" in choice] == ["too short"]
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == "no"
    assert choices[-1]["finish_reason"] == "stop"


async def test_the_clients_own_accumulator(client: openai.AsyncOpenAI, engine: ScriptedOmni) -> None:
    engine.script = TWO_PIECES
    async with client.chat.completions.stream(model=MODEL, messages=HELLO, audio=PCM) as stream:
        message = (await stream.get_final_completion()).choices[0].message
    assert message.content == message.audio.transcript == "blue cat"
    assert base64.b64decode(message.audio.data) == pcm16(expected_sound())
    assert message.audio.id.count("audio-") == 1
    assert message.audio.expires_at < 1 << 33
