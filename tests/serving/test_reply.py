"""Whole answers of the chat endpoint."""

from __future__ import annotations

import base64
import io
from dataclasses import replace
from typing import Any

import numpy as np
import openai
import pytest
import soundfile

from tests.serving.conftest import MODEL
from tests.support import media
from tests.support.scripted import RATE, ScriptedOmni, sound
from vllm_omni_ext.modalities.sound import pcm16

pytestmark = pytest.mark.asyncio(loop_scope="session")

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
TWO_PIECES = ["blue ", sound(300, frames=2), "cat", sound(299, frames=5, finished=True)]


async def ask(client: openai.AsyncOpenAI, **fields: Any) -> Any:
    fields = {"model": MODEL, "messages": HELLO, **fields}
    return await client.chat.completions.create(**fields)


def expected_sound() -> np.ndarray:
    return np.concatenate([piece.samples for piece in TWO_PIECES if not isinstance(piece, str)])


async def test_text_and_wav_by_default(client: openai.AsyncOpenAI, engine: ScriptedOmni) -> None:
    engine.script = TWO_PIECES
    reply = await ask(client)
    choice = reply.choices[0]
    assert choice.message.content == choice.message.audio.transcript == "blue cat"
    samples, rate = soundfile.read(io.BytesIO(base64.b64decode(choice.message.audio.data)), dtype="int16")
    assert (rate, samples.tobytes()) == (RATE, pcm16(expected_sound()))
    assert choice.message.audio.id.startswith("audio-")
    assert choice.message.audio.expires_at > 1_700_000_000
    assert choice.audio_metadata == {"format": "wav", "sample_rate_hz": RATE, "frame_count": 599, "channels": 1}
    assert choice.finish_reason == "stop"
    assert reply.usage.completion_tokens_details.audio_tokens == 5
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (3, 2, 5)
    assert engine.calls[0].options.modalities == ("text", "audio")
    assert engine.calls[0].closed


async def test_sound_alone_has_no_content(client: openai.AsyncOpenAI, engine: ScriptedOmni) -> None:
    engine.script = TWO_PIECES
    reply = await ask(client, modalities=["audio"], audio={"voice": "Ethan", "format": "pcm16"})
    choice = reply.choices[0]
    assert choice.message.content is None
    assert choice.message.audio.transcript == "blue cat"
    assert base64.b64decode(choice.message.audio.data) == pcm16(expected_sound())
    assert choice.audio_metadata["format"] == "pcm16"
    assert engine.calls[0].options.fields["voice"] == "Ethan"


@pytest.mark.parametrize(("name", "kind"), [("flac", "FLAC"), ("mp3", "MP3"), ("opus", "OGG")])
async def test_formats(client: openai.AsyncOpenAI, engine: ScriptedOmni, name: str, kind: str) -> None:
    tone = np.sin(np.arange(24_000, dtype=np.float32) / 20) / 2
    engine.script = ["a", replace(sound(0, frames=13, finished=True), samples=tone)]
    choice = (await ask(client, audio={"voice": "ethan", "format": name})).choices[0]
    file = io.BytesIO(base64.b64decode(choice.message.audio.data))
    info = soundfile.info(file)
    assert (info.format, info.samplerate, info.channels, info.frames) == (kind, RATE, 1, 24_000)
    file.seek(0)
    heard, _ = soundfile.read(file)
    if name == "flac":
        assert (heard * 2**15).astype("<i2").tobytes() == pcm16(tone)
    assert np.corrcoef(heard, tone)[0, 1] > 0.9
    assert choice.audio_metadata["format"] == name


async def test_text_alone_is_stock(client: openai.AsyncOpenAI, engine: ScriptedOmni) -> None:
    engine.script = ["blue ", "cat"]
    reply = await ask(client, modalities=["text"], n=1)
    assert reply.choices[0].message.content == "blue cat"
    assert reply.choices[0].message.audio is None
    assert not hasattr(reply.choices[0], "audio_metadata")
    assert reply.usage.completion_tokens_details is None
    assert engine.calls[0].options.modalities == ("text",)


async def test_too_short_to_speak(client: openai.AsyncOpenAI, engine: ScriptedOmni) -> None:
    engine.script = [sound(0, finished=True, note="too short"), "no"]
    for modalities in (["text", "audio"], ["audio"]):
        reply = await ask(client, modalities=modalities)
        assert reply.choices[0].message.audio is None
        assert reply.choices[0].message.content == "no"
        assert reply.choices[0].audio_metadata["note"] == "too short"
        assert reply.choices[0].audio_metadata["frame_count"] == 0


async def test_sound_before_text_and_after(client: openai.AsyncOpenAI, engine: ScriptedOmni) -> None:
    engine.script = [sound(6, frames=1), "a", "b", sound(6, frames=2), sound(6, frames=3, finished=True)]
    reply = await ask(client)
    assert reply.choices[0].audio_metadata["frame_count"] == 18
    assert reply.choices[0].message.content == "ab"


async def test_earlier_spoken_answers_are_read_as_text(client: openai.AsyncOpenAI, engine: ScriptedOmni) -> None:
    engine.script = TWO_PIECES
    for modalities in (["audio"], ["text", "audio"]):
        first = (await ask(client, modalities=modalities)).choices[0].message
        assert first.audio is not None
        await ask(client, messages=[*HELLO, first, *HELLO])
        text = [*HELLO, {"role": "assistant", "content": "blue cat"}, *HELLO]
        await ask(client, messages=text)
        spoken, written = engine.calls[-2:]
        assert spoken.prompt["prompt_token_ids"] == written.prompt["prompt_token_ids"]


async def test_other_endpoints_are_text_only(client: openai.AsyncOpenAI, engine: ScriptedOmni) -> None:
    engine.script = ["blue ", "cat"]
    reply = await client.completions.create(model=MODEL, prompt="hello")
    assert reply.choices[0].text == "blue cat"
    assert engine.calls[0].options is None


async def test_talker_sampling(client: openai.AsyncOpenAI, engine: ScriptedOmni) -> None:
    engine.script = TWO_PIECES
    await ask(client, seed=7, temperature=0, extra_body={"talker": {"top_k": 3, "max_tokens": 50}})
    talker = engine.calls[0].options.params["talker"]
    configured = engine.plan.stage("talker").params
    assert (talker.seed, talker.top_k, talker.max_tokens) == (7, 3, 50)
    assert talker.temperature == configured["temperature"] > 0
    assert engine.calls[0].params.temperature == 0
    await ask(client, seed=7, extra_body={"talker": {"seed": 8, "temperature": 0}})
    talker = engine.calls[1].options.params["talker"]
    assert (talker.seed, talker.temperature) == (8, 0)
    await ask(client)
    assert engine.calls[2].options.params == {}


async def test_sampling_by_stage_in_a_list(client: openai.AsyncOpenAI, engine: ScriptedOmni) -> None:
    engine.script = TWO_PIECES
    text = {"temperature": 0.25, "top_p": 0.5, "max_tokens": 9, "seed": 4, "stop": ["!"], "detokenize": True}
    talker = {"temperature": 0.75, "top_k": 3, "seed": 5, "detokenize": False}
    entries = [text, talker, {"temperature": 0.0, "top_k": -1, "max_tokens": 65536}]
    await ask(client, extra_body={"sampling_params_list": entries})
    call = engine.calls[0]
    params, chosen = call.params, call.options.params
    assert (params.temperature, params.top_p, params.max_tokens, params.seed) == (0.25, 0.5, 9, 4)
    assert params.stop == ["!"]
    assert (chosen["talker"].temperature, chosen["talker"].top_k, chosen["talker"].seed) == (0.75, 3, 5)
    assert set(chosen) == {"talker"}


async def test_configured_parameters_of_the_frontend(
    client: openai.AsyncOpenAI, engine: ScriptedOmni, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = engine.plan
    frontend = replace(plan.frontend(), params={"temperature": 0.25, "top_p": 0.5, "max_tokens": 9})
    stages = tuple(frontend if stage.name == frontend.name else stage for stage in plan.stages)
    monkeypatch.setattr(engine, "plan", replace(plan, stages=stages))
    engine.script = TWO_PIECES
    entries = [{"top_p": 0.75}]
    await ask(client, max_completion_tokens=7, extra_body={"sampling_params_list": entries})
    await ask(client, temperature=1)
    first, second = (call.params for call in engine.calls)
    assert (first.temperature, first.top_p, first.max_tokens) == (0.25, 0.75, 7)
    assert (second.temperature, second.top_p, second.max_tokens) == (1, 0.5, 9)


async def test_a_field_is_stronger_than_the_list(client: openai.AsyncOpenAI, engine: ScriptedOmni) -> None:
    engine.script = TWO_PIECES
    entries = [{"temperature": 0.25, "max_tokens": 9}, {"temperature": 0.75, "top_k": 3}]
    body = {"sampling_params_list": entries, "talker": {"temperature": 0.5}}
    await ask(client, temperature=0.125, max_completion_tokens=7, extra_body=body)
    call = engine.calls[0]
    assert (call.params.temperature, call.params.max_tokens) == (0.125, 7)
    assert (call.options.params["talker"].temperature, call.options.params["talker"].top_k) == (0.5, 3)
    await ask(client, extra_body={"sampling_params_list": entries[:1]})
    assert engine.calls[1].options.params == {}


async def test_tokens_of_heard_sound_are_counted(client: openai.AsyncOpenAI, engine: ScriptedOmni) -> None:
    engine.script = TWO_PIECES
    part = {"type": "audio_url", "audio_url": {"url": media.audio_url(media.audio(1.0, seed=1))}}
    heard: list[Any] = [{"role": "user", "content": [part, {"type": "text", "text": "what?"}]}]
    pad = engine.model_config.hf_config.thinker_config.audio_token_id
    for modalities in (["text"], ["text", "audio"]):
        engine.script = ["a"] if modalities == ["text"] else TWO_PIECES
        reply = await ask(client, messages=heard, modalities=modalities)
        pads = engine.calls[-1].prompt["prompt_token_ids"].count(pad)
        assert reply.usage.prompt_tokens_details.audio_tokens == pads > 1
        stream = await ask(
            client, messages=heard, modalities=modalities, stream=True, stream_options={"include_usage": True}
        )
        *_, last = [chunk async for chunk in stream]
        assert last.usage.prompt_tokens_details.audio_tokens == pads


@pytest.mark.parametrize("field", ["voice", "speaker"])
async def test_voice_on_top_level(client: openai.AsyncOpenAI, engine: ScriptedOmni, field: str) -> None:
    engine.script = TWO_PIECES
    voice = engine.capabilities.card["voices"][-1]
    await ask(client, extra_body={field: voice})
    assert engine.calls[0].options.fields["voice"] == voice
