"""What the chat endpoint refuses, and how failures look."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from tests.serving.scripted import ScriptedOmni, sound
from tests.serving.test_reply import HELLO, TWO_PIECES, ask
from tests.serving.test_stream import events
from vllm_omni_ext.errors import OmniError, RequestError, RequestFailed, StageUnavailable

pytestmark = pytest.mark.asyncio(loop_scope="session")

WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "modality": ({"modalities": ["text", "smell"]}, "modalities", "text, audio"),
    "no modality": ({"modalities": []}, "modalities", "at least one"),
    "modalities type": ({"modalities": "audio"}, "modalities", "list"),
    "voice": ({"audio": {"voice": "alloy", "format": "wav"}}, "audio.voice", "ethan"),
    "custom voice": ({"audio": {"voice": {"id": "v"}, "format": "wav"}}, "audio.voice", "name of a voice"),
    "top voice": ({"voice": "alloy"}, "voice", "ethan"),
    "speaker": ({"speaker": "alloy"}, "speaker", "ethan"),
    "format": ({"audio": {"voice": "ethan", "format": "mp3"}}, "audio.format", "wav, pcm16"),
    "audio type": ({"audio": "wav"}, "audio", "voice and format"),
    "audio key": ({"audio": {"vioce": "ethan"}}, "audio.vioce", "voice, format"),
    "n": ({"n": 2}, "n", "must be 1"),
    "beam search": ({"use_beam_search": True}, "use_beam_search", "modalities"),
    "talker type": ({"talker": 3}, "talker", "temperature"),
    "talker key": ({"talker": {"heat": 1}}, "talker.heat", "temperature"),
    "talker value type": ({"talker": {"top_k": "many"}}, "talker.top_k", "integer"),
    "talker flag": ({"talker": {"temperature": True}}, "talker.temperature", "number"),
    "talker value": ({"talker": {"temperature": -1}}, "talker.temperature", "temperature"),
    "talker top_p": ({"talker": {"top_p": 2}}, "talker.top_p", "top_p"),
    "talker max_tokens": ({"talker": {"max_tokens": 0}}, "talker.max_tokens", "max_tokens"),
    "talker top_k": ({"talker": {"top_k": -5}}, "talker.top_k", "top_k"),
    "talker penalty": ({"talker": {"repetition_penalty": 0}}, "talker.repetition_penalty", "repetition_penalty"),
    "audio id alone": (
        {"messages": [*HELLO, {"role": "assistant", "audio": {"id": "audio-1"}}, *HELLO]},
        "messages[1].audio",
        "transcript",
    ),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", WRONG)
async def test_refused(client: openai.AsyncOpenAI, engine: ScriptedOmni, case: str, stream: bool) -> None:
    fields, parameter, said = WRONG[case]
    messages = fields.get("messages", HELLO)
    rest = {name: value for name, value in fields.items() if name != "messages"}
    with pytest.raises(openai.BadRequestError) as caught:
        await ask(client, messages=messages, stream=stream, extra_body=rest)
    assert caught.value.param == parameter
    assert said in caught.value.body["message"]
    assert caught.value.body["type"] == "BadRequestError"
    assert engine.calls == []


async def test_n_is_fine_for_text(client: openai.AsyncOpenAI, engine: ScriptedOmni) -> None:
    engine.script = ["a"]
    await ask(client, n=2, modalities=["text"])
    assert engine.calls[0].params.n == 2


FAILURES: dict[OmniError, tuple[int, str | None]] = {
    RequestError("prompt: nobody speaks", parameter="prompt"): (400, "prompt"),
    StageUnavailable("stage talker has no live replica"): (503, None),
    RequestFailed("the talker lost it"): (500, None),
}


@pytest.mark.parametrize("modalities", [["text"], ["text", "audio"]])
@pytest.mark.parametrize("error", FAILURES)
async def test_failures(
    client: openai.AsyncOpenAI, engine: ScriptedOmni, error: OmniError, modalities: list[str]
) -> None:
    status, parameter = FAILURES[error]
    for script in ([error], ["a", error]):
        engine.script = script
        with pytest.raises(openai.APIStatusError) as caught:
            await ask(client, modalities=modalities)
        assert (caught.value.status_code, caught.value.body["code"]) == (status, status)
        assert (caught.value.param, caught.value.body["message"]) == (parameter, str(error))


@pytest.mark.parametrize("modalities", [["text"], ["text", "audio"]])
@pytest.mark.parametrize("error", FAILURES)
async def test_failures_in_a_stream(app: Any, engine: ScriptedOmni, error: OmniError, modalities: list[str]) -> None:
    status, parameter = FAILURES[error]
    before = [sound(600, frames=1)] if "audio" in modalities else []
    for script in ([error], ["a", "b", *before, error]):
        engine.script = script
        *_, last, done = await events(app, {"modalities": modalities, "stream_options": {"include_usage": True}})
        assert done == "[DONE]"
        body = json.loads(last)["error"]
        assert (body["code"], body["param"], body["message"]) == (status, parameter, str(error))
        assert engine.calls[-1].closed


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("modalities", [["text"], ["text", "audio"]])
async def test_disconnect_ends_the_request(app: Any, engine: ScriptedOmni, modalities: list[str], stream: bool) -> None:
    waiting = asyncio.Event()

    async def hang() -> None:
        waiting.set()
        await asyncio.Event().wait()

    engine.script = ["a", *([sound(600, frames=1)] if "audio" in modalities else []), "b", hang, "c"]
    tasks = asyncio.all_tasks()
    body = json.dumps({"messages": HELLO, "modalities": modalities, "stream": stream}).encode()
    await asyncio.wait_for(_post_and_leave(app, body, waiting), timeout=10)
    for _ in range(10):  # what a closed generator leaves to the event loop
        await asyncio.sleep(0)
    assert engine.calls[0].closed
    assert asyncio.all_tasks() <= tasks


async def _post_and_leave(app: Any, body: bytes, leave: asyncio.Event) -> None:
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "path": "/v1/chat/completions",
        "raw_path": b"/v1/chat/completions",
        "root_path": "",
        "scheme": "http",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"host", b"server")],
        "client": ("127.0.0.1", 1),
        "server": ("server", 80),
    }
    sent = False

    async def receive() -> dict[str, Any]:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}
        await leave.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        pass

    await app(scope, receive, send)


async def test_works_after_all_that(client: openai.AsyncOpenAI, engine: ScriptedOmni) -> None:
    engine.script = TWO_PIECES
    assert (await ask(client)).choices[0].message.audio is not None
