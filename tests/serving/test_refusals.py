"""Requests that endpoints refuse, and errors of the engine in their answers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from tests.serving.conftest import asking, disconnect
from tests.serving.test_reply import HELLO, ask
from tests.serving.test_stream import events
from tests.support.scripted import ScriptedOmni, sound
from vllm_omni_ext.errors import OmniError, RequestError, RequestFailed, StageUnavailable

pytestmark = pytest.mark.asyncio(loop_scope="session")

JSON = {"content-type": "application/json"}

LIST = "sampling_params_list"
TOOLS = [{"type": "function", "function": {"name": "look"}}]
WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "modality": ({"modalities": ["text", "smell"]}, "modalities", "text, audio"),
    "no modality": ({"modalities": []}, "modalities", "at least one"),
    "voice": ({"audio": {"voice": "nobody", "format": "wav"}}, "audio.voice", "ethan"),
    "custom voice": ({"audio": {"voice": {"id": "v"}, "format": "wav"}}, "audio.voice", "name of a voice"),
    "format": ({"audio": {"voice": "ethan", "format": "au"}}, "audio.format", "wav, pcm16, flac, mp3, opus"),
    "audio in content": ({"audio_in_content": "yes"}, "audio_in_content", "true or false"),
    "chunks key": ({"chunks": {"frame": [4]}}, "chunks.frame", "text, frames, adaptive"),
    "list type": ({LIST: {"talker": {}}}, LIST, "thinker, talker, code2wav"),
    "list length": ({LIST: [{}] * 4}, LIST, "thinker, talker, code2wav"),
    "list entry": ({LIST: [{}, 1]}, f"{LIST}[1]", "temperature"),
    "list key": ({LIST: [{}, {"heat": 1}]}, f"{LIST}[1].heat", "temperature"),
    "list text value": ({LIST: [{"top_p": 7}]}, f"{LIST}[0].top_p", "top_p"),
    "list sound value": ({LIST: [None, None, {"seed": "x"}]}, f"{LIST}[2].seed", "64"),
    "large integer": ({"talker": {"seed": 1 << 70}}, "talker.seed", "64 bits"),
    "long value": ({"voice": "x" * 100_000}, "voice", "..."),
    "audio type": ({"audio": "wav"}, "audio", "voice and format"),
    "audio key": ({"audio": {"vioce": "ethan"}}, "audio.vioce", "voice, format"),
    "n": ({"n": 2}, "n", "must be 1"),
    "beam search": ({"use_beam_search": True}, "use_beam_search", "modalities"),
    "talker type": ({"talker": 3}, "talker", "temperature"),
    "talker key": ({"talker": {"heat": 1}}, "talker.heat", "temperature"),
    "frontend key": ({"thinker": {"heat": 1}}, "thinker.heat", "temperature"),
    "frontend value": ({"thinker": {"top_p": 7}}, "thinker.top_p", "top_p"),
    "frontend twice": ({"thinker": {"top_k": 1}, "top_k": 1}, "thinker.top_k", "set twice, also as 'top_k'"),
    "parameters of a stage without any": ({"code2wav": {"temperature": 1.0}}, "code2wav", "takes no parameters"),
    "two voices": ({"audio": {"voice": "ethan"}, "voice": "chelsie"}, "voice", "another value than 'audio.voice'"),
    "voice and speaker": ({"voice": "ethan", "speaker": "chelsie"}, "speaker", "another value than 'voice'"),
    "talker flag": ({"talker": {"temperature": True}}, "talker.temperature", "number"),
    "talker max_tokens": ({"talker": {"max_tokens": 0}}, "talker.max_tokens", "max_tokens"),
    "audio id alone": (
        {"messages": [*HELLO, {"role": "assistant", "audio": {"id": "audio-1"}}, *HELLO]},
        "messages[1].audio",
        "transcript",
    ),
}


@pytest.mark.parametrize("field", [{"n": 2}, {"use_beam_search": True}, {"tools": TOOLS}], ids=str)
async def test_a_model_without_text_recommends_none(
    client: openai.AsyncOpenAI, app: Any, engine: ScriptedOmni, monkeypatch: pytest.MonkeyPatch, field: dict[str, Any]
) -> None:
    speaks = replace(engine.capabilities, modalities=("audio",), default_modalities=("audio",))
    monkeypatch.setattr(app.state.openai_serving_chat._model, "capabilities", speaks)
    with pytest.raises(openai.BadRequestError) as caught:
        await ask(client, modalities=["audio"], extra_body=field)
    assert caught.value.param in field and "modalities" not in caught.value.body["message"]
    assert engine.calls == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", WRONG)
async def test_a_wrong_field_is_refused_and_named(
    client: openai.AsyncOpenAI, engine: ScriptedOmni, case: str, stream: bool
) -> None:
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


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(
            (name, number)
            for name in ("temperature", "talker", "logit_bias")
            for number in ("NaN", "-Infinity", "1e999")
        ),
        *(("structured_outputs", "[]"), ("response_format", "3"), ("stream_options", "[]"), ("tools", "[3]")),
        *(("voice", '"\\ud800"'), ("talker", '{"\\ud800": 1}'), ("stop", '["\\ud800", 1]')),
    ],
)
async def test_json_that_no_engine_can_take_is_refused(app: Any, engine: ScriptedOmni, field: str, value: str) -> None:
    keys = {"talker": "temperature", "logit_bias": "1"}
    inside = f'{{"{keys[field]}": {value}}}' if field in keys and not value.startswith("{") else value
    response = await post(app, json.dumps({"messages": HELLO})[:-1] + f', "{field}": {inside}}}')
    assert (response.status_code, response.json()["error"]["code"]) == (400, 400), response.text
    assert engine.calls == []


async def test_errors_of_unknown_paths_and_methods_are_json(app: Any) -> None:
    async with asking(app) as http:
        for response in (await http.get("/v1/nothing"), await http.delete("/v1/audio/voices")):
            assert response.json()["error"]["code"] == response.status_code in (404, 405)


async def test_a_body_beyond_the_limit_is_refused_with_and_without_a_length(app: Any, engine: ScriptedOmni) -> None:
    most = engine.plan.config.limits.max_body_mib << 20
    async with asking(app) as http:
        for headers in ({"content-length": str(most + 1)}, {}):

            async def body(claimed: bool = bool(headers)) -> AsyncIterator[bytes]:
                for _ in range(1 if claimed else 1 + (most >> 20)):
                    yield b" " * (1 << 20)

            response = await http.post("/v1/chat/completions", content=body(), headers=JSON | headers)
            assert (response.status_code, response.json()["error"]["code"]) == (413, 413)


async def post(app: Any, body: str | bytes, path: str = "/v1/chat/completions") -> httpx.Response:
    async with asking(app) as http:
        return await http.post(path, content=body, headers=JSON)


async def test_several_answers_of_text_are_allowed(client: openai.AsyncOpenAI, engine: ScriptedOmni) -> None:
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
async def test_errors_of_the_engine_have_a_status(
    client: openai.AsyncOpenAI, engine: ScriptedOmni, error: OmniError, modalities: list[str]
) -> None:
    status, parameter = FAILURES[error]
    for script in ([error], ["a", error]):
        engine.script = script
        with pytest.raises(openai.APIStatusError) as caught:
            await ask(client, modalities=modalities)
        assert (caught.value.status_code, caught.value.body["code"]) == (status, status)
        assert (caught.value.param, caught.value.body["message"]) == (parameter, str(error))


@pytest.mark.parametrize("error", FAILURES)
async def test_errors_of_the_engine_have_a_status_in_messages(app: Any, engine: ScriptedOmni, error: OmniError) -> None:
    engine.script = ["a", error]
    answer = await post(app, json.dumps(TEXT_ROUTES["/v1/messages"]), "/v1/messages")
    assert (answer.status_code, answer.json()["error"]["message"]) == (FAILURES[error][0], str(error))


@pytest.mark.parametrize("modalities", [["text"], ["text", "audio"]])
@pytest.mark.parametrize("error", FAILURES)
async def test_an_error_ends_a_stream(app: Any, engine: ScriptedOmni, error: OmniError, modalities: list[str]) -> None:
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
    script = ["a", *([sound(600, frames=1)] if "audio" in modalities else []), "b"]
    body = {"messages": HELLO, "modalities": modalities, "stream": stream}
    await disconnect(app, engine, "/v1/chat/completions", body, script)


@pytest.fixture
def counted(engine: ScriptedOmni, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The errors that the observer has counted."""
    found: list[str] = []
    monkeypatch.setattr(engine.observer, "refused", lambda error, stage="": found.append(type(error).__name__))
    return found


TEXT_ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hello"},
    "/v1/responses": {"input": "Hello"},
    "/v1/messages": {"model": "tiny", "max_tokens": 5, "messages": HELLO},
    "/v1/chat/completions/batch": {"messages": [HELLO]},
}
COUNT = "/v1/messages/count_tokens"
COUNTED_ROUTES = TEXT_ROUTES | {COUNT: {"model": "tiny", "messages": HELLO}}


@pytest.mark.parametrize("path", COUNTED_ROUTES)
@pytest.mark.parametrize(
    ("fields", "parameter", "said"),
    [
        ({"modalities": ["text", "audio"]}, "modalities", "{path} answers text only"),
        ({"modalities": ["smell"]}, "modalities", "'smell' is not available"),
        ({"audio": {"voice": "ethan", "format": "wav"}}, "audio", "/v1/chat/completions answers with audio"),
        ({"talker": {"temperature": 0.5}}, "talker", "{path} does not read it"),
        ({LIST: []}, LIST, "use /v1/chat/completions"),
        ({"chunks": {"frames": [4]}}, "chunks", "use /v1/chat/completions"),
        ({"return_stage_metrics": True}, "return_stage_metrics", "use /v1/chat/completions"),
        ({"voice": "ethan"}, "voice", "use /v1/chat/completions"),
    ],
)
async def test_text_apis_refuse_fields_that_only_a_chat_may_have(
    app: Any, engine: ScriptedOmni, path: str, fields: dict[str, Any], parameter: str, said: str, counted: list[str]
) -> None:
    answer = await post(app, json.dumps(COUNTED_ROUTES[path] | fields), path)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["message"].startswith(f"{parameter}: ")
    assert path.startswith("/v1/messages") or (error["param"], error["code"]) == (parameter, 400)
    assert len(counted) == 1 and engine.calls == []
    assert said.format(path=path) in error["message"]


async def test_fields_that_clients_of_anthropic_send_are_accepted(app: Any, engine: ScriptedOmni) -> None:
    engine.script = ["Hi"]
    fields = {"metadata": {"user_id": "u"}, "service_tier": "auto", "cache_control": {"type": "ephemeral"}}
    fields |= {"context_management": {"edits": []}, "temperature": 0, "modalities": ["text"]}
    answer = await post(app, json.dumps(TEXT_ROUTES["/v1/messages"] | fields), "/v1/messages?beta=true")
    assert (answer.status_code, answer.json()["content"][0]["text"]) == (200, "Hi"), answer.text
    answer = await post(app, json.dumps(COUNTED_ROUTES[COUNT] | fields), COUNT)
    assert answer.status_code == 200 and answer.json()["input_tokens"] > 0, answer.text


@pytest.mark.parametrize("path", TEXT_ROUTES)
async def test_text_apis_refuse_values_that_no_engine_can_take(
    app: Any, engine: ScriptedOmni, path: str, counted: list[str]
) -> None:
    stop = "stop_sequences" if path == "/v1/messages" else "stop"
    for fields, name in (({stop: ["\ud800"]}, f"{stop}[0]"), ({"top_k": 1 << 70}, "top_k")):
        answer = await post(app, json.dumps(TEXT_ROUTES[path] | fields), path)
        assert answer.status_code == 400 and f"{name}: must be" in answer.text
    assert len(counted) == 2 and engine.calls == []
    engine.script = ["Hi"]
    answer = await post(app, json.dumps({**TEXT_ROUTES[path], "modalities": ["text"]}), path)
    assert answer.status_code == 200 and len(engine.calls) == 1, answer.text


@pytest.mark.parametrize("path", TEXT_ROUTES)
async def test_text_apis_of_a_model_without_text_refuse_all_requests(
    app: Any, engine: ScriptedOmni, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    speaks = replace(engine.capabilities, modalities=("audio",), default_modalities=("audio",))
    monkeypatch.setattr(app.state.openai_serving_chat._model, "capabilities", speaks)
    answer = await post(app, json.dumps(TEXT_ROUTES[path]), path)
    assert answer.status_code == 400 and "model: it has no text" in answer.text
    assert engine.calls == []


PATHS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", COUNT),
    *("/v1/audio/speech", "/tokenize", "/detokenize"),
)


@pytest.mark.parametrize("path", PATHS)
async def test_every_invalid_body_is_counted_once(
    app: Any, engine: ScriptedOmni, path: str, counted: list[str]
) -> None:
    for body in (b"{", b"[]", b'"text"', b'{"model": 3, "messages": 3}', b'{"model": ["x"]}'):
        counted.clear()
        answer = await post(app, body, path)
        assert (answer.status_code, counted) == (400, ["RequestError"]), answer.text
    assert engine.calls == []


LONG = [{"role": "user", "content": "a b " * 9000}]
DAMAGED = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}]
PICTURE = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
DAMAGED_MESSAGE = [{"role": "user", "content": [{"type": "image", "source": PICTURE}]}]
CHAT = "/v1/chat/completions"
REFUSED_BY_VLLM: dict[str, tuple[str, dict[str, Any]]] = {
    "long chat": (CHAT, {"messages": LONG}),
    "damaged picture": (CHAT, {"messages": DAMAGED}),
    "temperature": (CHAT, {"messages": HELLO, "temperature": -1}),
    "long prompt": ("/v1/completions", {"prompt": "a b " * 9000}),
    "long text": ("/tokenize", {"prompt": "x " * 20_000}),
    "long message": ("/v1/messages", TEXT_ROUTES["/v1/messages"] | {"messages": LONG}),
    "temperature of a message": ("/v1/messages", TEXT_ROUTES["/v1/messages"] | {"temperature": -1}),
    "damaged picture in a message": ("/v1/messages", TEXT_ROUTES["/v1/messages"] | {"messages": DAMAGED_MESSAGE}),
    "damaged picture in a count": (COUNT, {"model": "tiny", "messages": DAMAGED_MESSAGE}),
    "long input": ("/v1/responses", {"input": LONG[0]["content"]}),
    "unsupported store": ("/v1/responses", {"input": "Hello", "background": True}),
    "beam search": ("/v1/completions", {"prompt": "Hello", "stream": True, "use_beam_search": True}),
}


@pytest.mark.parametrize("case", REFUSED_BY_VLLM)
async def test_refusals_of_vllm_are_counted_once(app: Any, engine: ScriptedOmni, case: str, counted: list[str]) -> None:
    path, body = REFUSED_BY_VLLM[case]
    answer = await post(app, json.dumps(body), path)
    assert (answer.status_code, counted, engine.calls) == (400, ["RequestError"], []), answer.text


@pytest.mark.parametrize(
    ("path", "body"),
    [*TEXT_ROUTES.items(), (CHAT, {"messages": HELLO}), (CHAT, {"messages": HELLO, "modalities": ["text"]})],
)
async def test_a_client_that_leaves_is_not_counted_as_refused(
    app: Any, engine: ScriptedOmni, path: str, body: dict[str, Any], counted: list[str]
) -> None:
    await disconnect(app, engine, path, body, ["a"])
    assert counted == []


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": HELLO}),
        ("/v1/audio/speech", {"input": "Hello"}),
        ("/v1/messages", TEXT_ROUTES["/v1/messages"]),
    ],
)
async def test_a_failure_that_the_orchestrator_has_counted_is_not_counted_again(
    app: Any, engine: ScriptedOmni, path: str, body: dict[str, Any], begun: bool, counted: list[str]
) -> None:
    error = RequestError("prompt: too long for the talker", parameter="prompt")
    if begun:
        error.add_note("history of the request")  # as the orchestrator does to the errors that it counts
    engine.script = [error]
    answer = await post(app, json.dumps(body), path)
    assert (answer.status_code, counted) == (400, [] if begun else ["RequestError"]), answer.text


@pytest.mark.slow
async def test_the_page_of_the_api_has_the_fields_of_the_chat(app: Any) -> None:
    async with asking(app) as http:
        page = (await http.get("/openapi.json")).json()
    fields = page["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    assert fields["modalities"]["items"]["enum"] == ["text", "audio"]
    assert {"min_p", "seed", "top_k"} <= fields["talker"]["properties"].keys()
    assert {"messages", "audio", "voice", "audio_in_content", "sampling_params_list", "chunks"} <= fields.keys()
    assert "temperature" in fields["thinker"]["properties"]
