"""Bodies that are refused before anything is made of them, on every route that reads one."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute

from tests.support.scripted import ScriptedOmni
from vllm_omni_ext.serving.body_gate import BodyGate, RefusedBody, refused_handler
from vllm_omni_ext.serving.body_scan import BodyLimits
from vllm_omni_ext.serving.short_errors import LONGEST_ERROR, ShortErrors, shorten

HELLO = [{"role": "user", "content": "hello"}]
JSON = {"content-type": "application/json"}
PIECE = 1 << 16


def asking(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://server", timeout=60)


async def pieces(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), PIECE):
        yield body[start : start + PIECE]


async def send(app: Any, path: str, body: bytes, headers: dict[str, str] = JSON) -> httpx.Response:
    async with asking(app) as http:
        return await http.post(path, content=pieces(body), headers=headers)


def many(before: str, item: str, count: int, after: str) -> bytes:
    return f"{before}[{','.join([item] * count)}]{after}".encode()


def routes(app: FastAPI) -> list[str]:
    return [
        route.path.replace("{response_id}", "x")
        for route in app.routes
        if isinstance(route, APIRoute) and "POST" in route.methods and route.dependant.body_params
    ]


async def test_every_route_with_a_body(app: FastAPI, engine: ScriptedOmni) -> None:
    forms = {"/v1/audio/transcriptions", "/v1/audio/translations"}
    paths = {*routes(app), "/invocations"} - forms
    assert {"/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize", "/v1/audio/speech"} <= paths
    for path in paths:
        answer = await send(app, path, many('{"model": "tiny", "messages": ', "{}", 20_000, "}"))
        assert (answer.status_code, answer.json()["error"]["param"]) == (413, "messages"), (path, answer.text)
    assert engine.calls == []


SHAPES: dict[str, tuple[str, bytes, str]] = {
    "messages": ("/v1/chat/completions", many('{"messages": ', "{}", 100_000, "}"), "messages"),
    "parts": ("/v1/chat/completions", many('{"messages": [{"content": ', "{}", 200_000, "}]}"), "messages"),
    "tools": ("/v1/chat/completions", many('{"messages": [], "tools": ', "{}", 5_000, "}"), "tools"),
    "stop": ("/v1/chat/completions", many('{"messages": [], "stop": ', '"a"', 200_000, "}"), "stop"),
    "talker": ("/v1/chat/completions", many('{"messages": [], "talker": {"a": ', "1", 200_000, "}}"), "talker"),
    "depth": ("/v1/chat/completions", b'{"x": ' + b"[" * 5000 + b"]" * 5000 + b"}", "x"),
    "metadata": ("/v1/responses", many('{"input": "a", "metadata": ', '{"a": 1}', 100_000, "}"), "metadata"),
    "conversations": ("/v1/chat/completions/batch", many('{"messages": ', "[{}]", 2_000, "}"), "messages"),
    "ids": ("/v1/completions", many('{"prompt": ', "1", 2_100_000, "}"), "prompt"),
    "prompts": ("/v1/completions", many('{"prompt": ', "[1]", 200_000, "}"), "prompt"),
    "text": ("/v1/chat/completions", b'{"messages": [], "user": "' + b"a" * 2_000_000 + b'"}', "user"),
    "key": ("/v1/chat/completions", b'{"messages": [], "' + b"a" * 2_000_000 + b'": 1}', "body"),
    "wide": ("/v1/chat/completions", b'{"messages": "\xf0\x9f\x8e\x89' + b"a" * 9_000_000 + b'"}', "messages"),
    "grammar": (
        "/v1/chat/completions",
        b'{"messages": [], "structured_outputs": {"regex": "' + b"a" * 500_000 + b'"}}',
        "structured_outputs",
    ),
    "utf-16": ("/v1/chat/completions", '{"messages": []}'.encode("utf-16"), "body"),
}


@pytest.mark.parametrize("shape", SHAPES)
async def test_shapes(app: FastAPI, engine: ScriptedOmni, shape: str) -> None:
    path, body, parameter = SHAPES[shape]
    answer = await send(app, path, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (413, parameter, 413)
    assert error["message"].startswith(f"{parameter}: ")
    assert engine.calls == []


@pytest.mark.parametrize(
    "kind", ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"]
)
async def test_content_types_hide_nothing(app: FastAPI, kind: str) -> None:
    """`/invocations` reads JSON whatever its content type; so may a route of another package."""
    seen = []
    inner = FastAPI()

    @inner.post("/")
    async def read(request: Request) -> int:
        seen.append(await request.body())
        return 1

    limits = BodyLimits(
        values=100, ids=100, depth=9, in_field={}, field_values={}, field_bytes={}, wide_text_bytes=1 << 20
    )
    inner.add_middleware(BodyGate, limits=limits)
    inner.add_exception_handler(RefusedBody, refused_handler)  # type: ignore[arg-type]
    answer = await send(inner, "/", b" \n" + many('{"messages": ', "{}", 1000, "}"), {"content-type": kind})
    assert answer.status_code == 413 and seen == []
    answer = await send(inner, "/", b"--x\r\n" + b",[{" * 1000, {"content-type": kind})
    assert (answer.status_code, len(seen)) == ((200, 1) if kind.startswith("multi") or "form" in kind else (413, 0))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/tokenize", "/v1/messages"])
async def test_the_first_errors_are_enough(app: FastAPI, engine: ScriptedOmni, path: str) -> None:
    field = "input" if path == "/v1/responses" else "messages"
    body = many(f'{{"model": "tiny", "max_tokens": 1, "{field}": ', "{}", 3_000, "}")
    tracemalloc.start()
    try:
        answer = await send(app, path, body)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert answer.status_code == 400 and len(answer.content) < 4096
    assert most < 8 << 20


async def test_the_routes_own_adapters_fail_fast_too(app: FastAPI) -> None:
    from vllm_omni_ext.serving.first_error import _adapters

    (route,) = (route for route in app.routes if getattr(route, "path", "") == "/invocations")
    adapters = list(_adapters(route))
    assert len(adapters) >= 2
    for adapter in adapters:
        with pytest.raises(ValueError) as caught:
            adapter.validate_python({"prompt": "a", "messages": [{}] * 1000, "stop_token_ids": ["x"] * 1000})
        assert caught.value.error_count() < 100  # type: ignore[attr-defined]


async def test_plain_vllm_is_as_before(app: FastAPI) -> None:
    from pydantic import ValidationError
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    with pytest.raises(ValidationError) as caught:
        ChatCompletionRequest(messages=[{}] * 100)
    assert caught.value.error_count() == 1500


async def test_large_requests_that_are_meant(app: FastAPI, engine: ScriptedOmni) -> None:
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string", "enum": ["a", "b"]} for i in range(50)}}
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": schema}} for i in range(128)]
    turns = [HELLO[0], {"role": "assistant", "content": [{"type": "text", "text": "yes"}]}] * 2000
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * (27 << 20)}}
    for fields, said in (
        ({"messages": HELLO, "tools": tools, "tool_choice": "none"}, None),
        ({"messages": turns}, "maximum context length"),
        ({"messages": [{"role": "user", "content": [image, {"type": "text", "text": "🎉"}]}]}, "image"),
        ({"messages": [{"role": "user", "content": "世" * 1_000_000}]}, "maximum context length"),
    ):
        engine.script = ["fine"]
        answer = await send(app, "/v1/chat/completions", json.dumps({**fields, "modalities": ["text"]}).encode())
        assert answer.status_code == (200 if said is None else 400), answer.text
        assert said is None or said in answer.text
    answer = await send(app, "/v1/completions", json.dumps({"prompt": list(range(100_000))}).encode())
    assert answer.status_code == 400 and "100000 input tokens" in answer.text


async def test_errors_are_short() -> None:
    inner = FastAPI()
    inner.add_middleware(ShortErrors)

    @inner.get("/{status}/{size}")
    async def answer(status: int, size: int) -> JSONResponse:
        return JSONResponse({"error": {"message": "x" * size, "param": "y" * size, "code": status}}, status)

    async with asking(inner) as http:
        long, short, fine = [await http.get(path) for path in ("/400/100000", "/400/5000", "/200/100000")]
    assert long.status_code == 400 and len(long.content) < LONGEST_ERROR
    assert int(long.headers["content-length"]) == len(long.content)
    assert long.json()["error"]["code"] == 400 and long.json()["error"]["param"].startswith("yyy")
    assert len(short.json()["error"]["message"]) == 5000 and len(fine.json()["error"]["message"]) == 100_000


def test_what_is_no_error_stays() -> None:
    for body in (b"[1, 2]", b'{"status": "unhealthy"}', b'{"error": "x"}', b"x"):
        assert shorten(body) == body
