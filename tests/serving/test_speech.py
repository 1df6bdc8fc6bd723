"""The speech endpoint, the list of voices and the model's card."""

from __future__ import annotations

import asyncio
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
from tests.serving.test_refusals import post_and_leave
from tests.support.scripted import RATE, ScriptedOmni, sound
from vllm_omni_ext.errors import OmniError, RequestError, RequestFailed, StageUnavailable
from vllm_omni_ext.modalities.sound import pcm16

pytestmark = pytest.mark.asyncio(loop_scope="session")

PIECES = [sound(301, frames=2), sound(299, frames=5, finished=True)]
PCM = pcm16(np.concatenate([piece.samples for piece in PIECES]))
TEXT = "read this out"


async def post(app: Any, **fields: Any) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://server") as http:
        return await http.post("/v1/audio/speech", json={"input": TEXT, **fields})


def events(response: httpx.Response) -> list[tuple[str, Any]]:
    """Kind and data of each event."""
    assert response.headers["content-type"].startswith("text/event-stream")
    found = []
    for block in response.text.split("\n\n")[:-1]:
        *kind, data = block.splitlines()
        text = data.removeprefix("data: ")
        found.append((kind[0].removeprefix("event: ") if kind else "", text if text == "[DONE]" else json.loads(text)))
    return found


def samples_of(data: bytes) -> bytes:
    samples, rate = soundfile.read(io.BytesIO(data), dtype="int16")
    assert rate == RATE
    return samples.tobytes()


async def test_wav_by_default(app: Any, engine: ScriptedOmni) -> None:
    engine.script = PIECES
    response = await post(app)
    assert (response.status_code, response.headers["content-type"]) == (200, "audio/wav")
    assert samples_of(response.content) == PCM
    counts = {name: value for name, value in response.headers.items() if name.startswith("x-vllm-omni-")}
    assert counts == {
        "x-vllm-omni-input-tokens": "3",
        "x-vllm-omni-output-tokens": "5",
        "x-vllm-omni-total-tokens": "8",
        "x-vllm-omni-input-text-tokens": "3",
        "x-vllm-omni-input-audio-tokens": "0",
    }
    call = engine.calls[0]
    assert (call.prompt, call.options.modalities, call.options.fields, call.closed) == (TEXT, ("audio",), {}, True)


async def test_the_official_client(client: openai.AsyncOpenAI, engine: ScriptedOmni) -> None:
    engine.script = PIECES
    whole = await client.audio.speech.create(model=MODEL, voice="ethan", input=TEXT, response_format="pcm")
    assert whole.content == PCM
    speech = client.audio.speech.with_streaming_response
    async with speech.create(model=MODEL, voice="Ethan", input=TEXT, response_format="wav") as response:
        assert samples_of(b"".join([piece async for piece in response.iter_bytes()])) == PCM
    assert engine.calls[1].options.fields["voice"] == "Ethan"


@pytest.mark.parametrize(
    ("name", "media", "kind"), [("flac", "flac", "FLAC"), ("mp3", "mpeg", "MP3"), ("opus", "ogg", "OGG")]
)
async def test_files(app: Any, engine: ScriptedOmni, name: str, media: str, kind: str) -> None:
    engine.script = PIECES
    for fields in ({}, {"stream_format": "audio"}, {"stream": False}):
        response = await post(app, response_format=name, **fields)
        assert response.headers["content-type"] == f"audio/{media}"
        info = soundfile.info(io.BytesIO(response.content))
        assert (info.format, info.samplerate, info.frames) == (kind, RATE, 600)


@pytest.mark.parametrize("fields", [{"stream": True}, {"stream_format": "audio"}])
async def test_bare_sound_as_it_is_made(app: Any, engine: ScriptedOmni, fields: dict[str, Any]) -> None:
    engine.script = PIECES
    response = await post(app, response_format="pcm", **fields)
    assert (response.headers["content-type"], response.content) == ("audio/pcm", PCM)
    assert "content-length" not in response.headers
    response = await post(app, response_format="wav", **fields)
    assert samples_of(response.content) == PCM


async def test_events(app: Any, engine: ScriptedOmni) -> None:
    engine.script = PIECES
    *deltas, (kind, done) = events(await post(app, response_format="pcm", stream_format="sse"))
    assert {(kind, data["type"], data["response_format"]) for kind, data in deltas} == {
        ("speech.audio.delta", "speech.audio.delta", "pcm")
    }
    assert b"".join(base64.b64decode(data["audio"]) for _, data in deltas) == PCM
    assert len(deltas) == 2
    assert (kind, done["type"]) == ("speech.audio.done", "speech.audio.done")
    assert done["usage"] == {
        "input_tokens": 3,
        "output_tokens": 5,
        "total_tokens": 8,
        "input_token_details": {"text_tokens": 3, "audio_tokens": 0},
    }
    *deltas, _ = events(await post(app, stream_format="sse"))
    assert samples_of(base64.b64decode("".join(data["audio"] for _, data in deltas))) == PCM


async def test_no_sound(app: Any, engine: ScriptedOmni) -> None:
    """The talker may have nothing to say."""
    engine.script = [sound(0, finished=True, note="nothing")]
    for name in ("wav", "pcm", "flac", "opus", "mp3"):
        assert (await post(app, response_format=name)).status_code == 200
    assert [kind for kind, _ in events(await post(app, stream_format="sse"))][-1] == "speech.audio.done"


async def test_sampling(app: Any, engine: ScriptedOmni) -> None:
    engine.script = PIECES
    await post(app, seed=7, max_new_tokens=50, talker={"top_k": 3})
    talker = engine.calls[0].options.params["talker"]
    assert (talker.seed, talker.max_tokens, talker.top_k) == (7, 50, 3)
    await post(app)
    assert engine.calls[1].options.params == {}


WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "voice": ({"voice": "nobody"}, "voice", "ethan"),
    "speaker": ({"speaker": "nobody"}, "speaker", "ethan"),
    "custom voice": ({"voice": {"id": "v"}}, "voice", "name of a voice"),
    "format": ({"response_format": "aac"}, "response_format", "wav, pcm, flac, mp3, opus"),
    "speed": ({"speed": 2}, "speed", "1.0"),
    "instructions": ({"instructions": "whisper"}, "instructions", "chat"),
    "clone": ({"ref_audio": "data:"}, "ref_audio", "voices"),
    "rate": ({"sample_rate": 16_000}, "sample_rate", "24000"),
    "language": ({"language": "French"}, "language", "auto"),
    "stream format": ({"stream_format": "websocket"}, "stream_format", "sse, audio"),
    "mp3 events": ({"stream_format": "sse", "response_format": "mp3"}, "response_format", "wav, pcm"),
    "mp3 stream": ({"stream": True, "response_format": "mp3"}, "response_format", "wav, pcm"),
    "talker": ({"talker": {"heat": 1}}, "talker.heat", "temperature"),
    "type": ({"input": 3}, "body.input", "string"),
    "frames": ({"max_new_tokens": 0}, "body.max_new_tokens", "1"),
}


@pytest.mark.parametrize("case", WRONG)
async def test_refused(app: Any, engine: ScriptedOmni, case: str) -> None:
    fields, parameter, said = WRONG[case]
    response = await post(app, **fields)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, 400, parameter)
    assert said in error["message"]
    assert engine.calls == []


async def test_unknown_model(app: Any, engine: ScriptedOmni) -> None:
    response = await post(app, model="gpt-5")
    assert (response.status_code, response.json()["error"]["param"]) == (404, "model")


FAILURES: dict[OmniError, int] = {
    RequestError("input: too long", parameter="input"): 400,
    StageUnavailable("stage talker has no live replica"): 503,
    RequestFailed("the talker lost it"): 500,
}
HOW = [{}, {"stream": True}, {"stream_format": "sse"}]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("error", FAILURES)
async def test_failures_before_the_first_sound(
    app: Any, engine: ScriptedOmni, error: OmniError, how: dict[str, Any]
) -> None:
    for refusal, script in ((error, []), (None, [error])):
        engine.refusal, engine.script = refusal, script
        response = await post(app, **how)
        body = response.json()["error"]
        assert (response.status_code, body["code"], body["message"]) == (FAILURES[error], FAILURES[error], str(error))
    assert all(call.closed for call in engine.calls)


async def test_failures_after_the_first_sound(app: Any, engine: ScriptedOmni) -> None:
    error = StageUnavailable("gone")
    engine.script = [PIECES[0], error]
    assert (await post(app)).status_code == 503
    delta, (kind, data), done = events(await post(app, stream_format="sse"))
    assert (delta[0], kind, data["error"]["code"]) == ("speech.audio.delta", "speech.audio.error", 503)
    assert done == ("", "[DONE]")
    with pytest.raises(StageUnavailable):  # a real server breaks the connection off
        await post(app, stream=True)
    assert all(call.closed for call in engine.calls)


@pytest.mark.parametrize("how", HOW)
async def test_disconnect_ends_the_request(app: Any, engine: ScriptedOmni, how: dict[str, Any]) -> None:
    for heard in ([], PIECES[:1]):
        waiting = asyncio.Event()

        async def hang(waiting: asyncio.Event = waiting) -> None:
            waiting.set()
            await asyncio.Event().wait()

        engine.script = [*heard, hang]
        tasks = asyncio.all_tasks()
        body = json.dumps({"input": TEXT, **how}).encode()
        await asyncio.wait_for(post_and_leave(app, body, waiting, "/v1/audio/speech"), timeout=10)
        for _ in range(10):  # what a closed generator leaves to the event loop
            await asyncio.sleep(0)
        assert engine.calls[-1].closed
        assert asyncio.all_tasks() <= tasks


async def test_voices(app: Any, engine: ScriptedOmni) -> None:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://server") as http:
        voices = (await http.get("/v1/audio/voices")).json()
    assert voices == {"voices": engine.capabilities.card["voices"], "default_voice": "ethan"}


async def test_model_card(client: openai.AsyncOpenAI, engine: ScriptedOmni) -> None:
    card = (await client.models.list()).data[0]
    assert (card.id, card.modalities, card.voices) == (MODEL, ["text", "audio"], engine.capabilities.card["voices"])


async def test_chunks(app: Any, engine: ScriptedOmni) -> None:
    engine.script = PIECES
    assert (await post(app, chunks={"frames": [4, 25], "adaptive": False})).status_code == 200
    assert engine.calls[0].options.chunks == {"frames": [4, 25], "adaptive": False}
    for chunks, parameter in ((3, "chunks"), ({"frames": []}, "chunks.frames")):
        response = await post(app, chunks=chunks)
        assert (response.status_code, response.json()["error"]["param"]) == (400, parameter)


async def test_every_refusal_is_counted_once(app: Any, engine: ScriptedOmni, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[str] = []
    monkeypatch.setattr(engine.observer, "refused", lambda error, stage="": counted.append(type(error).__name__))
    for fields in ({"voice": "nobody"}, {"response_format": "aac"}, {"speed": 9.0}):
        assert (await post(app, **fields)).status_code == 400
    assert counted == ["RequestError"] * 3
    engine.script = PIECES
    assert (await post(app)).status_code == 200 and len(counted) == 3
