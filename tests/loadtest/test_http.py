"""Chat and speech against a small server in this process that answers from a script."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer, unused_port

from tests.loadtest.test_figures import Clock
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.loadtest.answers import BROKEN, CONNECT, ERROR, MALFORMED, SOUNDLESS, TIMEOUT, Answer, Failure
from vllm_omni_ext.loadtest.client import Api, Request, base64_bytes, connections, measured, only_model
from vllm_omni_ext.loadtest.http import Chat, Speech, read_chunk

SECOND = bytes(48_000)
"""A second of 16-bit samples at 24 kHz."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving(**handlers: Handler):
    """A server with a handler for each path of /v1, `_` for `/` in it; yields the URL of /v1."""
    app = web.Application()
    for name, handler in handlers.items():
        app.router.add_route("*", f"/v1/{name.replace('_', '/')}", handler)
    server = TestServer(app)
    await server.start_server()
    try:
        yield str(server.make_url("/v1"))
    finally:
        await server.close()


async def one(api: Api, *, key: str | None = None, clock: Clock | None = None, limit: float = 30.0) -> Answer:
    async with connections(key) as session:
        return await measured(api, session, clock or asyncio.get_running_loop().time, limit, 0, None)


def event(value: Any) -> bytes:
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields}]}


def audio(data: bytes) -> str:
    return base64.b64encode(data).decode()


OPENAI = [
    delta(role="assistant", content=""),
    delta(content="Hel"),
    delta(audio={"id": "a"}),
    delta(audio={"id": "a", "data": audio(SECOND)}),
    delta(audio={"id": "a", "transcript": "lo"}),
    delta(audio={"id": "a", "data": audio(SECOND[:24_000])}),
    {"choices": [], "usage": {"total_tokens": 3}},
    b"[DONE]",
]
VLLM_OMNI = [
    {**delta(role="assistant", content=""), "modality": "text"},
    {**delta(content="Hello"), "modality": "text"},
    {**delta(role="assistant", content=audio(SECOND)), "modality": "audio"},
    {**delta(role="assistant", content=""), "modality": "audio"},
    {**delta(role="assistant", content=audio(SECOND[:24_000])), "modality": "audio"},
    b"[DONE]",
]


def streamed(data: bytes, sizes: int, content_type: str = "text/event-stream") -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": content_type})
        await response.prepare(request)
        for at in range(0, len(data), sizes):
            await response.write(data[at : at + sizes])
        return response

    return handler


@pytest.mark.parametrize("script", [OPENAI, VLLM_OMNI], ids=["OpenAI", "vllm-omni"])
@pytest.mark.parametrize("sizes", [997, 1 << 20])
async def test_a_chat_in_either_format_has_its_text_and_all_its_sound(script: list[Any], sizes: int) -> None:
    data = b": comment\n\n" + b"".join(map(event, script))
    async with serving(chat_completions=streamed(data, sizes)) as url:
        got = await one(Chat(url, Request(model="m", prompts=("Hi",))))
    assert (got.failure, got.sound_s) == (None, 1.5)
    assert 0 < got.first_text_s <= got.first_sound_s <= got.whole_s


async def test_an_event_longer_than_all_buffers_is_read() -> None:
    data = b"".join(map(event, [delta(audio={"data": audio(SECOND * 60)}), b"[DONE]"]))
    async with serving(chat_completions=streamed(data, 1 << 16)) as url:
        assert (await one(Chat(url, Request(model="m", prompts=("Hi",))))).sound_s == 60.0


class ReadClock(Clock):
    """Sets an event when it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.read = asyncio.Event()

    def __call__(self) -> float:
        self.read.set()
        return super().__call__()


@pytest.mark.parametrize("kind", ["chat", "speech"])
async def test_times_are_those_of_the_arriving_pieces(kind: str) -> None:
    clock = ReadClock()

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        clock.now = 1.0
        await response.prepare(request)
        for piece, now in ((SECOND, 3.0), (SECOND, 3.5), (SECOND, 6.0)):
            clock.read.clear()
            await response.write(event(delta(audio={"data": audio(piece)})) if kind == "chat" else piece)
            await clock.read.wait()
            clock.now = now
        await response.write(event(b"[DONE]") if kind == "chat" else b"")
        return response

    async with serving(chat_completions=handler, audio_speech=handler) as url:
        api = {"chat": Chat, "speech": Speech}[kind](url, Request(model="m", prompts=("Hi",)))
        got = await one(api, clock=clock)
    assert (got.first_sound_s, got.sound_s, got.silences, got.whole_s) == (1.0, 3.0, (1.0,), 6.0)


async def test_a_body_has_openais_fields_only() -> None:
    bodies, keys = [], []

    async def handler(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        keys.append(request.headers.get("Authorization"))
        return web.Response(status=400, text="no")

    plain = Request(model="m", prompts=("Hi", "Ho"))
    full = Request(
        model="m", prompts=("Hi",), sounds=(("AAAA", "wav"),), voice="v", max_tokens=7, extra={"seed": 1, "stream": 2}
    )
    async with serving(chat_completions=handler, audio_speech=handler) as url:
        for api in (Chat(url, plain), Chat(url, full), Speech(url, plain), Speech(url, full)):
            assert (await one(api, key="k")).failure == "status 400"
    chat = {"model": "m", "modalities": ["text", "audio"], "stream": True}
    parts = [{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, {"type": "text", "text": "Hi"}]
    assert bodies == [
        {**chat, "messages": [{"role": "user", "content": "Hi"}], "audio": {"format": "pcm16"}},
        {
            **chat,
            "messages": [{"role": "user", "content": parts}],
            "audio": {"format": "pcm16", "voice": "v"},
            "max_completion_tokens": 7,
            "seed": 1,
            "stream": 2,
        },
        {"model": "m", "input": "Hi", "response_format": "pcm", "stream_format": "audio"},
        {
            "model": "m",
            "input": "Hi",
            "response_format": "pcm",
            "stream_format": "audio",
            "voice": "v",
            "seed": 1,
            "stream": 2,
        },
    ]
    assert keys == ["Bearer k"] * 4
    assert [plain.prompt(number) for number in range(3)] == ["Hi", "Ho", "Hi"]


async def closed(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(event(OPENAI[3]))
    assert request.transport is not None
    request.transport.abort()
    return response


async def refused(request: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {"message": "busy"}}, status=503)


async def silent(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    await asyncio.Event().wait()
    return response


@pytest.mark.parametrize(
    ("handler", "kind", "detail"),
    [
        (refused, "status 503", "busy"),
        (closed, BROKEN, "Error"),
        (streamed(event(OPENAI[3]), 100), BROKEN, "without [DONE]"),
        (streamed(event({"error": {"message": "lost"}}), 100), ERROR, "lost"),
        (streamed(event(OPENAI[1]) + event(b"[DONE]"), 100), SOUNDLESS, "without sound"),
        (streamed(event(b"{no"), 100), MALFORMED, "no JSON"),
        (streamed(event(b"[]"), 100), MALFORMED, "no JSON object"),
        (streamed(event(delta(audio={"data": "abc"})), 100), MALFORMED, "no base64"),
        (streamed(event({"choices": [3]}), 100), MALFORMED, "format of a chat"),
    ],
)
async def test_a_failure_of_a_chat_has_its_kind_and_message(handler: Handler, kind: str, detail: str) -> None:
    async with serving(chat_completions=handler) as url:
        got = await one(Chat(url, Request(model="m", prompts=("Hi",))))
    assert got.failure == kind
    assert detail in got.detail


async def test_a_silent_server_is_a_timeout_and_none_is_no_connection() -> None:
    request = Request(model="m", prompts=("Hi",))
    async with serving(chat_completions=silent) as url:
        got = await one(Chat(url, request), limit=0.2)
        assert (got.failure, got.detail) == (TIMEOUT, "no whole answer after 0.2 s")
    assert (await one(Chat(f"http://127.0.0.1:{unused_port()}/v1", request))).failure == CONNECT


async def test_speech_in_pieces_that_cut_samples_has_its_whole_length() -> None:
    async with serving(audio_speech=streamed(SECOND, 4801, "audio/pcm")) as url:
        got = await one(Speech(url, Request(model="m", prompts=("Hi",))))
    assert (got.failure, got.first_text_s) == (None, None)
    assert got.sound_s == pytest.approx(1.0)


async def test_speech_that_is_no_sound_is_malformed() -> None:
    async with serving(audio_speech=streamed(b"{}", 2, "application/json")) as url:
        got = await one(Speech(url, Request(model="m", prompts=("Hi",))))
    assert (got.failure, got.detail) == (MALFORMED, "the sound has the type application/json")


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 47_999])
def test_the_length_of_a_base64_text_is_that_of_its_bytes(size: int) -> None:
    assert base64_bytes(audio(bytes(size))) == size
    for wrong in ("a", None, 5):
        with pytest.raises(Failure, match="no base64"):
            base64_bytes(wrong)


def test_a_chunk_without_choices_has_nothing() -> None:
    assert read_chunk({"usage": {}}) == (False, 0.0)
    assert read_chunk({"choices": None}) == (False, 0.0)
    assert read_chunk({"choices": [{"delta": None}, {}]}) == (False, 0.0)


def listed(value: Any) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.json_response(value)

    return handler


async def test_the_model_is_the_first_that_the_server_lists() -> None:
    async with aiohttp.ClientSession() as session:
        async with serving(models=listed({"data": [{"id": "a"}, {"id": "b"}]})) as url:
            assert await only_model(session, url) == "a"
        for handler in (listed({"data": []}), listed([]), listed({}), refused):
            async with serving(models=handler) as url:
                with pytest.raises(ConfigError, match=r"/v1/models: .*--model"):
                    await only_model(session, url)
        with pytest.raises(ConfigError, match="Cannot connect"):
            await only_model(session, f"http://127.0.0.1:{unused_port()}/v1")
