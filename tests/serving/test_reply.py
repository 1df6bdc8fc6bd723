"""Whole answers of the chat endpoint."""

from __future__ import annotations

import base64
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import soundfile

from tests.serving.conftest import MODEL, asking
from tests.support import media
from tests.support.scripted import RATE, ScriptedOmni, sound
from vllm_omni_ext.modalities.sound import pcm16

pytestmark = pytest.mark.asyncio(loop_scope="session")

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
TWO_PIECES = ["blue ", sound(300, frames=2), "cat", sound(299, frames=5, finished=True)]


PICTURE = media.image_url(media.image(32, 32, seed=1))


async def ask(client: openai.AsyncOpenAI, **fields: Any) -> Any:
    fields = {"model": MODEL, "messages": HELLO, **fields}
    return await client.chat.completions.create(**fields)


def expected_sound() -> np.ndarray:
    return np.concatenate([piece.samples for piece in TWO_PIECES if not isinstance(piece, str)])


async def test_an_answer_is_text_and_wav_by_default(client: openai.AsyncOpenAI, engine: ScriptedOmni) -> None:
    engine.script = [sound(0), *TWO_PIECES]
    reply = await ask(client)
    choice, audio = reply.choices[0], reply.choices[0].message.audio
    assert choice.message.content == audio.transcript == "blue cat"
    samples, rate = soundfile.read(io.BytesIO(base64.b64decode(audio.data)), dtype="int16")
    assert (rate, samples.tobytes()) == (RATE, pcm16(expected_sound()))
    assert audio.id.startswith("audio-") and audio.expires_at > 1_700_000_000
    assert choice.audio_metadata == {"format": "wav", "sample_rate_hz": RATE, "frame_count": 599, "channels": 1}
    assert choice.finish_reason == "stop"
    assert reply.usage.completion_tokens_details.audio_tokens == 5
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (3, 2 + 5, 10)
    assert engine.calls[0].options.modalities == ("text", "audio") and not engine.calls[0].options.streamed
    assert engine.calls[0].closed


async def test_a_reasoning_parser_separates_thoughts_from_answers(engine: ScriptedOmni, tiny: Path) -> None:
    from vllm_omni_ext.cli.serve import prepare
    from vllm_omni_ext.serving.app import make_app

    words = ["--served-model-name", MODEL, "--disable-log-stats", "--reasoning-parser", "qwen3"]
    _, args = prepare([str(tiny), *words])
    engine.script = ["<think>why</think>", "blue"]
    async with asking(await make_app(engine, args)) as http:
        body = {"model": MODEL, "messages": HELLO, "max_tokens": 9, "modalities": ["text"]}
        chat = (await http.post("/v1/chat/completions", json=body)).json()
        response = (await http.post("/v1/responses", json={"model": MODEL, "input": "hello"})).json()
        message = (await http.post("/v1/messages", json={**body, "modalities": None})).json()
    answer = chat["choices"][0]["message"]
    assert (answer["reasoning"], answer["content"]) == ("why", "blue")
    assert [part["content"][0]["text"] for part in response["output"]] == ["why", "blue"]
    assert [(part.get("thinking"), part.get("text")) for part in message["content"]] == [("why", None), (None, "blue")]


@pytest.mark.parametrize("modalities", [["text", "audio"], ["audio"]])
async def test_an_answer_without_sound_has_text_and_a_note(
    client: openai.AsyncOpenAI, engine: ScriptedOmni, modalities: list[str]
) -> None:
    engine.script = [sound(0, finished=True, note="too short"), "no"]
    choice = (await ask(client, modalities=modalities)).choices[0]
    assert (choice.message.audio, choice.message.content) == (None, "no")
    assert (choice.audio_metadata["note"], choice.audio_metadata["frame_count"]) == ("too short", 0)


async def test_parameters_of_stages_in_order_of_precedence(
    client: openai.AsyncOpenAI, engine: ScriptedOmni, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First fields of the request and of a stage's object, then the list, the request's seed, and the config."""
    frontend = replace(engine.plan.frontend(), params={"temperature": 0.25, "top_p": 0.5, "max_tokens": 9})
    stages = tuple(frontend if stage.name == frontend.name else stage for stage in engine.plan.stages)
    monkeypatch.setattr(engine, "plan", replace(engine.plan, stages=stages))
    configured, engine.script = engine.plan.stage("talker").params, TWO_PIECES
    listed = [
        {"temperature": 0.75, "top_p": 0.625, "stop": ["!"], "detokenize": True},
        {"temperature": 0.75, "top_k": 3, "seed": 5, "detokenize": False},
        {"temperature": 0.0, "top_k": -1, "max_tokens": 65536},
    ]
    body = {"sampling_params_list": listed, "talker": {"temperature": 0.5, "max_tokens": 50}}
    await ask(client, temperature=0.125, max_completion_tokens=7, seed=7, extra_body=body)
    text, chosen = engine.calls[0].params, engine.calls[0].options.params
    assert (text.temperature, text.top_p, text.max_tokens, text.seed, text.stop) == (0.125, 0.625, 7, 7, ["!"])
    talker = chosen["talker"]
    assert (talker.temperature, talker.top_k, talker.max_tokens, talker.seed) == (0.5, 3, 50, 5)
    assert set(chosen) == {"talker"}
    await ask(client, seed=7)
    text, talker = engine.calls[1].params, engine.calls[1].options.params["talker"]
    assert (text.temperature, text.top_p, text.max_tokens) == (0.25, 0.5, 9)
    assert (talker.seed, talker.temperature) == (7, configured["temperature"]) and talker.temperature > 0
    await ask(client, extra_body={"sampling_params_list": listed[:1]})
    assert engine.calls[2].options.params == {}
    limits = {"sampling_params_list": [{"max_tokens": 5}]}, {"thinker": {"max_tokens": 5}}, {}
    for most, limit in zip((5, 5, 9), limits, strict=True):
        await ask(client, extra_body={**limit, "max_tokens": None, "temperature": None})
        text = engine.calls[-1].params
        assert (text.max_tokens, text.temperature) == (most, 0.25), "null is as if the field were missing"


async def test_parameters_of_the_frontend_in_a_field_of_its_name(
    client: openai.AsyncOpenAI, engine: ScriptedOmni
) -> None:
    engine.script = TWO_PIECES
    listed = [{"temperature": 0.75, "top_p": 0.625}]
    named = {"temperature": 0.5, "max_tokens": 6, "seed": 3, "stop": ["!"]}
    await ask(client, seed=7, extra_body={"thinker": named, "sampling_params_list": listed})
    text = engine.calls[0].params
    assert (text.temperature, text.top_p, text.max_tokens, text.seed, text.stop) == (0.5, 0.625, 6, 3, ["!"])


async def test_sound_alone_has_no_content(client: openai.AsyncOpenAI, engine: ScriptedOmni) -> None:
    engine.script, body = TWO_PIECES, {"audio": {"voice": "Ethan", "format": "pcm16"}}
    for extra in (body, {"audio": {"format": "pcm16"}, "voice": "Ethan"}, {"audio": None, "speaker": "Ethan"}):
        choice = (await ask(client, modalities=["audio"], extra_body=extra)).choices[0]
        assert (choice.message.content, choice.message.audio.transcript) == (None, "blue cat")
        name = "pcm16" if extra["audio"] else "wav"
        assert choice.audio_metadata["format"] == name
        assert name == "wav" or base64.b64decode(choice.message.audio.data) == pcm16(expected_sound())
        assert engine.calls[-1].options.fields["voice"] == "Ethan"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("What", "What"),
        ([{"type": "text", "text": "What"}, {"type": "text", "text": "now"}], "What\nnow"),
        ([{"type": "image_url", "image_url": {"url": PICTURE}}, {"type": "text", "text": "What"}], "What"),
        ([{"type": "image_url", "image_url": {"url": PICTURE}}], ""),
    ],
)
async def test_the_text_of_the_last_message_is_echoed(
    client: openai.AsyncOpenAI, engine: ScriptedOmni, content: Any, text: str, stream: bool
) -> None:
    engine.script, messages = [" is it?"], [*HELLO, {"role": "user", "content": content}]
    body = {"echo": True, "add_generation_prompt": False}
    reply = await ask(client, messages=messages, modalities=["text"], stream=stream, extra_body=body)
    if stream:
        received = "".join([chunk.choices[0].delta.content or "" async for chunk in reply])
    else:
        received = reply.choices[0].message.content
    assert received == f"{text} is it?"


async def test_equal_values_of_two_names_are_one(client: openai.AsyncOpenAI, engine: ScriptedOmni) -> None:
    engine.script = TWO_PIECES
    names = {"audio": {"voice": "chelsie"}, "voice": "chelsie", "speaker": "chelsie"}
    await ask(client, extra_body=names)
    assert engine.calls[0].options.fields["voice"] == "chelsie"


async def test_earlier_spoken_answers_become_text_of_the_prompt(
    client: openai.AsyncOpenAI, engine: ScriptedOmni
) -> None:
    engine.script = TWO_PIECES
    for modalities in (["audio"], ["text", "audio"]):
        first = (await ask(client, modalities=modalities)).choices[0].message
        assert first.audio is not None
        await ask(client, messages=[*HELLO, first, *HELLO])
        text = [*HELLO, {"role": "assistant", "content": "blue cat"}, *HELLO]
        await ask(client, messages=text)
        spoken, written = engine.calls[-2:]
        assert spoken.prompt["prompt_token_ids"] == written.prompt["prompt_token_ids"]


@pytest.mark.parametrize("modalities", [["text"], ["text", "audio"]])
async def test_tokens_of_sound_in_the_prompt_are_counted(
    client: openai.AsyncOpenAI, engine: ScriptedOmni, modalities: list[str]
) -> None:
    part = {"type": "audio_url", "audio_url": {"url": media.audio_url(media.audio(1.0, seed=1))}}
    fields = {"messages": [{"role": "user", "content": [part]}], "modalities": modalities}
    engine.script = ["a"] if modalities == ["text"] else TWO_PIECES
    reply = await ask(client, **fields)
    pad = engine.model_config.hf_config.thinker_config.audio_token_id
    pads = engine.calls[-1].prompt["prompt_token_ids"].count(pad)
    assert reply.usage.prompt_tokens_details.audio_tokens == pads > 1
    stream = await ask(client, **fields, stream=True, stream_options={"include_usage": True})
    *_, last = [chunk async for chunk in stream]
    assert last.usage.prompt_tokens_details.audio_tokens == pads
