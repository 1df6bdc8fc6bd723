"""The speech endpoint, the list of voices and the model's card."""

from __future__ import annotations

import base64
import io
import json
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import soundfile

from tests.serving.conftest import MODEL, asking, disconnect
from tests.support.scripted import RATE, ScriptedOmni, sound
from vllm_omni_ext.errors import OmniError, RequestError, RequestFailed, StageUnavailable
from vllm_omni_ext.modalities.sound import pcm16
from vllm_omni_ext.serving.direct import DirectServing
from vllm_omni_ext.serving.speech import OF_FAMILIES

pytestmark = pytest.mark.asyncio(loop_scope="session")

PIECES = [sound(301, frames=2), sound(299, frames=5, finished=True)]
PCM = pcm16(np.concatenate([piece.samples for piece in PIECES]))
TEXT = "read this out"


async def post(app: Any, **fields: Any) -> httpx.Response:
    async with asking(app) as http:
        return await http.post("/v1/audio/speech", json={"input": TEXT, **fields})


def events(response: httpx.Response) -> list[tuple[str, Any]]:
    """Return kind and data of each event."""
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


async def test_the_answer_is_wav_with_counts_of_tokens_by_default(app: Any, engine: ScriptedOmni) -> None:
    engine.script = PIECES
    response = await post(app)
    assert (response.status_code, response.headers["content-type"]) == (200, "audio/wav")
    assert samples_of(response.content) == PCM
    prefix = "x-vllm-omni-"
    counts = {name.removeprefix(prefix): int(response.headers[name]) for name in response.headers if prefix in name}
    text, spoken = ("input-tokens", "input-text-tokens"), {"output-tokens": 5, "total-tokens": 8}
    assert counts == dict.fromkeys(text, 3) | {"input-audio-tokens": 0} | spoken
    call = engine.calls[0]
    assert (call.prompt, call.options.modalities, call.options.fields, call.closed) == (TEXT, ("audio",), {}, True)


@pytest.mark.parametrize("fields", [{}, {"stream_format": "audio"}, {"stream": False}, {"stream": True}])
async def test_formats_of_files_and_streams(app: Any, engine: ScriptedOmni, fields: dict[str, Any]) -> None:
    engine.script, whole = PIECES, fields in ({}, {"stream": False})
    for name, media, kind in (("flac", "flac", "FLAC"), ("mp3", "mpeg", "MP3"), ("opus", "ogg", "OGG")):
        response = await post(app, response_format=name, **fields)
        assert response.headers["content-type"] == f"audio/{media}"
        assert ("content-length" in response.headers) == whole == (not engine.calls[-1].options.streamed)
        info = soundfile.info(io.BytesIO(response.content))
        assert (info.format, info.samplerate) == (kind, RATE)
        assert info.frames == 600 if whole else info.frames >= 600
    response = await post(app, response_format="aac", **fields)
    assert (response.headers["content-type"], response.content[:2]) == ("audio/aac", b"\xff\xf1")
    response = await post(app, response_format="pcm", **fields)
    assert (response.headers["content-type"], response.content) == ("audio/pcm", PCM)
    assert ("content-length" in response.headers) == whole
    assert samples_of((await post(app, response_format="wav", **fields)).content) == PCM


async def test_events_carry_the_sound_and_the_usage(app: Any, engine: ScriptedOmni) -> None:
    engine.script = PIECES
    *deltas, (kind, done) = events(await post(app, response_format="pcm", stream_format="sse"))
    assert {(kind, data["type"], data["response_format"]) for kind, data in deltas} == {
        ("speech.audio.delta", "speech.audio.delta", "pcm")
    }
    assert b"".join(base64.b64decode(data["audio"]) for _, data in deltas) == PCM
    assert len(deltas) == 2 and engine.calls[0].options.streamed
    assert (kind, done["type"]) == ("speech.audio.done", "speech.audio.done")
    assert done["usage"] == {
        "input_tokens": 3,
        "output_tokens": 5,
        "total_tokens": 8,
        "input_token_details": {"text_tokens": 3, "audio_tokens": 0},
    }
    *deltas, _ = events(await post(app, stream_format="sse"))
    assert samples_of(base64.b64decode("".join(data["audio"] for _, data in deltas))) == PCM


async def test_an_answer_without_sound_is_no_error(app: Any, engine: ScriptedOmni) -> None:
    engine.script = [sound(0, finished=True, note="nothing")]
    for name in ("wav", "pcm", "flac", "opus", "mp3", "aac"):
        assert (await post(app, response_format=name)).status_code == 200
    assert [kind for kind, _ in events(await post(app, stream_format="sse"))][-1] == "speech.audio.done"


async def test_parameters_of_the_talker_and_chunks_reach_the_engine(app: Any, engine: ScriptedOmni) -> None:
    engine.script, chunks = PIECES, {"frames": [4, 25], "adaptive": False}
    await post(app, seed=7, max_new_tokens=50, talker={"top_k": 3, "max_tokens": 50}, chunks=chunks)
    await post(app, max_new_tokens=40, talker={"min_p": 0.5})
    talker = engine.calls[0].options.params["talker"]
    assert (talker.seed, talker.max_tokens, talker.top_k) == (7, 50, 3)
    assert engine.calls[0].options.chunks == chunks
    assert engine.calls[1].options.params["talker"].max_tokens == 40
    await post(app)
    assert engine.calls[2].options.params == {}


WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "voice": ({"voice": "nobody"}, "voice", "ethan"),
    "format": ({"response_format": "au"}, "response_format", "wav, pcm, flac, mp3, opus, aac"),
    "speed": ({"speed": 2}, "speed", "1.0"),
    "instructions": ({"instructions": "whisper"}, "instructions", "chat"),
    "clone": ({"ref_audio": "data:"}, "ref_audio", "voices"),
    "rate": ({"sample_rate": 16_000}, "sample_rate", "24000"),
    "language": ({"language": "French"}, "language", "auto"),
    "stream format": ({"stream_format": "websocket"}, "stream_format", "sse, audio"),
    "unknown": ({"vioce": "ethan"}, "vioce", "unknown to /v1/audio/speech"),
    "type": ({"input": 3}, "body.input", "string"),
    "two voices": ({"voice": "ethan", "speaker": "chelsie"}, "speaker", "another value than 'voice'"),
    "two limits": ({"max_new_tokens": 9, "talker": {"max_tokens": 8}}, "talker.max_tokens", "than 'max_new_tokens', 8"),
    "frames": ({"max_new_tokens": 0}, "body.max_new_tokens", "1"),
    "chunks": ({"chunks": 3}, "chunks", "object"),
    "format of a chat": ({"audio": {"voice": "ethan", "format": "mp3"}}, "audio.format", "write response_format"),
    "sound in content": ({"audio_in_content": True}, "audio_in_content", "unknown to /v1/audio/speech"),
    "voice of a chat": ({"audio": {"voice": "nobody", "format": None}}, "audio.voice", "ethan"),
}


@pytest.mark.parametrize("case", WRONG)
async def test_a_wrong_field_is_refused_and_counted(
    app: Any, engine: ScriptedOmni, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[str] = []
    monkeypatch.setattr(engine.observer, "refused", lambda error, stage="": counted.append(type(error).__name__))
    fields, parameter, said = WRONG[case]
    response = await post(app, **fields)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, 400, parameter)
    assert said in error["message"]
    assert engine.calls == [] and counted == ["RequestError"]


@pytest.mark.parametrize("name", [name for name in OF_FAMILIES if name not in ("voice", "speaker")])
async def test_fields_that_a_family_does_not_read_are_refused(
    app: Any, engine: ScriptedOmni, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    surface = app.state.omni_serving_speech.model.surface
    monkeypatch.setattr(type(surface), "speech_fields", ())
    engine.script = PIECES
    response = await post(app, **{name: 2 if name in ("speed", "sample_rate") else "x"})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, name)
    assert error["message"] == f"{name}: is not available with this model"
    assert (await post(app, **{name: OF_FAMILIES[name]})).status_code == 200


FAILURES: dict[OmniError, int] = {
    RequestError("input: too long", parameter="input"): 400,
    StageUnavailable("stage talker has no live replica"): 503,
    RequestFailed("the talker lost it"): 500,
}
HOW = [{}, {"stream": True}, {"stream_format": "sse"}]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("error", FAILURES)
async def test_an_error_before_the_first_sound_has_a_status(
    app: Any, engine: ScriptedOmni, error: OmniError, how: dict[str, Any]
) -> None:
    for refusal, script in ((error, []), (None, [error])):
        engine.refusal, engine.script = refusal, script
        response = await post(app, **how)
        body = response.json()["error"]
        assert (response.status_code, body["code"], body["message"]) == (FAILURES[error], FAILURES[error], str(error))
    assert all(call.closed for call in engine.calls)


async def test_an_error_after_the_first_sound_ends_the_stream(app: Any, engine: ScriptedOmni) -> None:
    error = StageUnavailable("gone")
    engine.script = [PIECES[0], error]
    assert (await post(app)).status_code == 503
    delta, (kind, data), done = events(await post(app, stream_format="sse"))
    assert (delta[0], kind, data["error"]["code"]) == ("speech.audio.delta", "speech.audio.error", 503)
    assert done == ("", "[DONE]")
    with pytest.raises(RuntimeError, match="already started"):  # a real server breaks the connection off
        await post(app, stream=True)
    assert all(call.closed for call in engine.calls)


@pytest.mark.parametrize("how", HOW)
async def test_disconnect_ends_the_request(app: Any, engine: ScriptedOmni, how: dict[str, Any]) -> None:
    for sent in ([], PIECES[:1]):
        await disconnect(app, engine, "/v1/audio/speech", {"input": TEXT, **how}, sent)


async def test_the_models_card_lists_modalities_and_voices(client: openai.AsyncOpenAI, engine: ScriptedOmni) -> None:
    card = (await client.models.list()).data[0]
    voices = engine.capabilities.card["voices"]
    assert (card.id, card.modalities, card.voices) == (MODEL, ["text", "audio"], voices)
    listed = await client.get("/audio/voices", cast_to=dict)
    assert listed == {"voices": voices, "default_voice": "ethan"}
    with pytest.raises(openai.NotFoundError):
        await client.audio.speech.create(model="gpt-5", voice="ethan", input=TEXT)


@pytest.mark.parametrize(("stages", "refused"), [({"thinker", "talker"}, True), ({"talker"}, False)])
async def test_an_adapter_is_refused_where_the_text_stage_would_ignore_it(stages: set[str], refused: bool) -> None:
    serving: Any = DirectServing.__new__(DirectServing)
    serving.models = SimpleNamespace(lora_requests={"tune": object()})
    plan = SimpleNamespace(frontend=lambda: SimpleNamespace(model_stage="thinker"))
    capabilities = SimpleNamespace(routes={"speech": frozenset(stages)})
    serving.model = SimpleNamespace(omni=SimpleNamespace(plan=plan), capabilities=capabilities)
    for name in (None, MODEL):
        serving.refuse_adapter(name, "speech")
    serving.refuse_adapter("tune", "images")
    with pytest.raises(RequestError, match="'tune' is an adapter") if refused else nullcontext():
        serving.refuse_adapter("tune", "speech")
