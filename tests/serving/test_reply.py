"""Whole answers of the chat endpoint."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import openai
import pytest
import soundfile

from tests.serving.conftest import MODEL
from tests.serving.scripted import RATE, ScriptedOmni, sound
from vllm_omni_ext.serving.wav import pcm16

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
    assert engine.calls[0].options.voice == "Ethan"


async def test_text_alone_is_stock(client: openai.AsyncOpenAI, engine: ScriptedOmni) -> None:
    engine.script = ["blue ", "cat"]
    reply = await ask(client, modalities=["text"], n=1)
    assert reply.choices[0].message.content == "blue cat"
    assert reply.choices[0].message.audio is None
    assert not hasattr(reply.choices[0], "audio_metadata")
    assert reply.usage.completion_tokens_details is None
    assert engine.calls[0].options.text_only


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
    talker = engine.calls[0].options.sampling["talker"]
    configured = engine.plan.stage("talker").sampling
    assert (talker.seed, talker.top_k, talker.max_tokens) == (7, 3, 50)
    assert talker.temperature == configured["temperature"] > 0
    assert engine.calls[0].params.temperature == 0
    await ask(client, seed=7, extra_body={"talker": {"seed": 8, "temperature": 0}})
    talker = engine.calls[1].options.sampling["talker"]
    assert (talker.seed, talker.temperature) == (8, 0)
    await ask(client)
    assert engine.calls[2].options.sampling == {}


@pytest.mark.parametrize("field", ["voice", "speaker"])
async def test_voice_on_top_level(client: openai.AsyncOpenAI, engine: ScriptedOmni, field: str) -> None:
    engine.script = TWO_PIECES
    voice = engine.plugin.voices[-1]
    await ask(client, extra_body={field: voice})
    assert engine.calls[0].options.voice == voice
