"""What the chat endpoint refuses, and how failures look."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from tests.serving.test_reply import HELLO, TWO_PIECES, ask
from tests.serving.test_stream import events
from tests.support.scripted import ScriptedOmni, sound
from vllm_omni_ext.errors import OmniError, RequestError, RequestFailed, StageUnavailable

pytestmark = pytest.mark.asyncio(loop_scope="session")

WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "modality": ({"modalities": ["text", "smell"]}, "modalities", "text, audio"),
    "no modality": ({"modalities": []}, "modalities", "at least one"),
    "modalities type": ({"modalities": "audio"}, "modalities", "list"),
    "voice": ({"audio": {"voice": "nobody", "format": "wav"}}, "audio.voice", "ethan"),
    "custom voice": ({"audio": {"voice": {"id": "v"}, "format": "wav"}}, "audio.voice", "name of a voice"),
    "top voice": ({"voice": "nobody"}, "voice", "ethan"),
    "speaker": ({"speaker": "nobody"}, "speaker", "ethan"),
    "format": ({"audio": {"voice": "ethan", "format": "aac"}}, "audio.format", "wav, pcm16, flac, mp3, opus"),
    "format type": ({"audio": {"voice": "ethan", "format": ["wav"]}}, "audio.format", "wav"),
    "audio in content": ({"audio_in_content": "yes"}, "audio_in_content", "true or false"),
    "chunks type": ({"chunks": [4]}, "chunks", "object"),
    "chunks key": ({"chunks": {"frame": [4]}}, "chunks.frame", "text, frames, adaptive"),
    "chunks value": ({"chunks": {"frames": [4, 0]}}, "chunks.frames", "sizes >= 1"),
    "list type": ({"sampling_params_list": {"talker": {}}}, "sampling_params_list", "thinker, talker, code2wav"),
    "list length": ({"sampling_params_list": [{}] * 4}, "sampling_params_list", "thinker, talker, code2wav"),
    "list entry": ({"sampling_params_list": [{}, 1]}, "sampling_params_list[1]", "temperature"),
    "list key": ({"sampling_params_list": [{}, {"heat": 1}]}, "sampling_params_list[1].heat", "temperature"),
    "list value": (
        {"sampling_params_list": [{}, {"temperature": -1}]},
        "sampling_params_list[1].temperature",
        "temperature",
    ),
    "list text value": ({"sampling_params_list": [{"top_p": 7}]}, "sampling_params_list[0].top_p", "top_p"),
    "list text type": ({"sampling_params_list": [{"stop": 7}]}, "sampling_params_list[0].stop", "texts"),
    "list sound value": ({"sampling_params_list": [None, None, {"seed": "x"}]}, "sampling_params_list[2].seed", "64"),
    "large integer": ({"talker": {"seed": 1 << 70}}, "talker.seed", "64 bits"),
    "large integer of vLLM": ({"top_k": 1 << 70}, "top_k", "64 bits"),
    "long value": ({"voice": "x" * 100_000}, "voice", "..."),
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
    assert len(caught.value.body["message"]) < 1100
    assert said in caught.value.body["message"]
    assert caught.value.body["type"] == "BadRequestError"
    assert engine.calls == []


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize(
    ("field", "value"), [("temperature", "%s"), ("talker", '{"temperature": %s}'), ("logit_bias", '{"1": %s}')]
)
async def test_numbers_no_engine_can_take(app: Any, engine: ScriptedOmni, number: str, field: str, value: str) -> None:
    body = json.dumps({"messages": HELLO})[:-1] + f', "{field}": {value % number}}}'
    response = await post(app, body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].partition(".")[0] == field
    assert engine.calls == []


async def test_bodies_that_vllms_checks_trip_over(app: Any, engine: ScriptedOmni) -> None:
    for field in ('"structured_outputs": []', '"response_format": 3', '"stream_options": []', '"tools": [3]'):
        response = await post(app, json.dumps({"messages": HELLO})[:-1] + f", {field}}}")
        assert response.status_code == 400, (field, response.text)
        assert response.json()["error"]["code"] == 400


async def test_unknown_paths_have_the_same_shape(app: Any) -> None:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://server") as http:
        for response in (await http.get("/v1/nothing"), await http.delete("/v1/audio/voices")):
            assert response.json()["error"]["code"] == response.status_code in (404, 405)


async def test_longest_body(app: Any, engine: ScriptedOmni) -> None:
    most = engine.plan.config.max_body_mib << 20
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
        for headers in ({"content-length": str(most + 1)}, {}):

            async def body(claimed: bool = bool(headers)) -> AsyncIterator[bytes]:
                for _ in range(1 if claimed else 1 + (most >> 20)):
                    yield b" " * (1 << 20)

            json_headers = {"content-type": "application/json", **headers}
            response = await http.post("/v1/chat/completions", content=body(), headers=json_headers)
            assert (response.status_code, response.json()["error"]["code"]) == (413, 413)


async def test_busy_says_when_to_come_back(app: Any, engine: ScriptedOmni) -> None:
    engine.script = [StageUnavailable("stage talker has no live replica")]
    response = await post(app, json.dumps({"messages": HELLO}))
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")


async def test_half_a_character_is_answered(app: Any, engine: ScriptedOmni) -> None:
    for field in ('"voice": "\\ud800"', '"talker": {"\\ud800": 1}', '"model": "\\ud800"', '"stop": ["\\ud800", 1]'):
        response = await post(app, json.dumps({"messages": HELLO})[:-1] + f", {field}}}")
        assert response.status_code in (400, 404), response.text


async def post(app: Any, body: str) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://server") as http:
        return await http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})


@pytest.mark.parametrize("name", ["flac", "mp3", "opus"])
async def test_files_cannot_be_streamed(client: openai.AsyncOpenAI, engine: ScriptedOmni, name: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await ask(client, stream=True, audio={"voice": "ethan", "format": name})
    assert (caught.value.param, "wav, pcm16" in caught.value.body["message"]) == ("audio.format", True)


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
    await asyncio.wait_for(post_and_leave(app, body, waiting), timeout=10)
    for _ in range(10):  # what a closed generator leaves to the event loop
        await asyncio.sleep(0)
    assert engine.calls[0].closed
    assert asyncio.all_tasks() <= tasks


async def post_and_leave(app: Any, body: bytes, leave: asyncio.Event, path: str = "/v1/chat/completions") -> None:
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
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


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"modalities": ["smell"]}, "modalities"),
        ({"audio": {"voice": "ethan", "format": "wav"}}, "audio"),
    ],
)
async def test_the_responses_api_refuses_what_is_not_text(
    app: Any, engine: ScriptedOmni, fields: dict[str, Any], parameter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[BaseException] = []
    monkeypatch.setattr(engine.observer, "refused", counted.append)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://server") as http:
        answer = await http.post("/v1/responses", json={"input": "Hello", **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, parameter, 400)
    assert len(counted) == 1 and engine.calls == []
    if parameter in fields and fields.get("modalities") != ["smell"]:
        assert "/v1/responses answers text only; /v1/chat/completions answers with audio" in error["message"]


INVALID = [b"{", b"[]", b'"text"', b'{"model": 3, "messages": 3}', b'{"model": ["x"]}']


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses", "audio/speech"])
@pytest.mark.parametrize("body", INVALID)
async def test_a_body_that_no_handler_gets_is_counted_once(
    app: Any, engine: ScriptedOmni, path: str, body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[str] = []
    monkeypatch.setattr(engine.observer, "refused", lambda error, stage="": counted.append(type(error).__name__))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://server") as http:
        answer = await http.post(f"/v1/{path}", content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, counted) == (400, ["RequestError"]), answer.text
    assert engine.calls == []


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_bodies_for_vllm_s_own_routes_are_counted_too(
    app: Any, engine: ScriptedOmni, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[BaseException] = []
    monkeypatch.setattr(engine.observer, "refused", counted.append)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://server") as http:
        answer = await http.post(path, json={"model": 3, "messages": 3})
    assert (answer.status_code, len(counted)) == (400, 1), answer.text
