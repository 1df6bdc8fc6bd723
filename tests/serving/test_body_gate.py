"""Middleware in front of all routes: limits of bodies and errors, and headers of answers."""

from __future__ import annotations

import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.routing import APIRoute

from tests.serving.conftest import asking
from tests.support.scripted import ScriptedOmni
from vllm_omni_ext.serving.body_gate import BodyGate, RefusedBody, refused_handler
from vllm_omni_ext.serving.body_scan import BodyLimits
from vllm_omni_ext.serving.gate import SERVER_HEADER, RequestLimitMiddleware
from vllm_omni_ext.serving.short_errors import LONGEST_ERROR, ShortErrors, shorten

JSON = {"content-type": "application/json"}
PIECE = 1 << 16


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


async def test_every_route_refuses_too_many_messages(app: FastAPI, engine: ScriptedOmni) -> None:
    forms = {"/v1/audio/transcriptions", "/v1/audio/translations"}
    paths = {*routes(app), "/invocations"} - forms
    assert {"/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize", "/v1/audio/speech"} <= paths
    for path in paths:
        answer = await send(app, path, many('{"model": "tiny", "messages": ', "{}", 20_000, "}"))
        assert (answer.status_code, answer.json()["error"]["param"]) == (413, "messages"), (path, answer.text)
    assert engine.calls == []


CHAT = "/v1/chat/completions"
SHAPES: dict[str, tuple[str, bytes, str]] = {
    "parts": (CHAT, many('{"messages": [{"content": ', "{}", 200_000, "}]}"), "messages"),
    "tools": (CHAT, many('{"messages": [], "tools": ', "{}", 5_000, "}"), "tools"),
    "talker": (CHAT, many('{"messages": [], "talker": {"a": ', "1", 200_000, "}}"), "talker"),
    "depth": (CHAT, b'{"x": ' + b"[" * 5000 + b"]" * 5000 + b"}", "x"),
    "conversations": (f"{CHAT}/batch", many('{"messages": ', "[{}]", 2_000, "}"), "messages"),
    "ids": ("/v1/completions", many('{"prompt": ', "1", 2_100_000, "}"), "prompt"),
    "text": (CHAT, b'{"messages": [], "user": "' + b"a" * 2_000_000 + b'"}', "user"),
    "key": (CHAT, b'{"messages": [], "' + b"a" * 2_000_000 + b'": 1}', "body"),
    "wide": (CHAT, b'{"messages": "\xf0\x9f\x8e\x89' + b"a" * 9_000_000 + b'"}', "messages"),
    "grammar": (CHAT, b'{"structured_outputs": {"regex": "' + b"a" * 500_000 + b'"}}', "structured_outputs"),
    "utf-16": (CHAT, '{"messages": []}'.encode("utf-16"), "body"),
}


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_body_beyond_a_limit_is_refused_with_its_field(app: FastAPI, engine: ScriptedOmni, shape: str) -> None:
    path, body, parameter = SHAPES[shape]
    answer = await send(app, path, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (413, parameter, 413)
    assert error["message"].startswith(f"{parameter}: ")
    assert engine.calls == []


@pytest.mark.parametrize(
    "kind", ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"]
)
async def test_no_content_type_hides_json(app: FastAPI, kind: str) -> None:
    """`/invocations` reads JSON of any content type; so may a route of another package."""
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


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/invocations"])
async def test_thousands_of_validation_errors_cost_little(app: FastAPI, engine: ScriptedOmni, path: str) -> None:
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


async def test_only_long_errors_are_cut() -> None:
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
    for body in (b"[1, 2]", b'{"status": "unhealthy"}', b'{"error": "x"}', b"x"):
        assert shorten(body) == body


def limited(server: int | None) -> httpx.AsyncClient:
    """Return a client of an application with a limit of 1 MiB."""
    inner = FastAPI()

    @inner.get("/stream")
    async def stream() -> StreamingResponse:
        return StreamingResponse(iter(["a", "b"]))

    @inner.post("/{status}")
    async def answer(status: int, request: Request) -> dict[str, Any]:
        if status != 200:
            raise HTTPException(status)
        return {"size": len(await request.body())}

    inner.add_middleware(RequestLimitMiddleware, max_body_mib=1, server=server)
    return asking(inner)


@pytest.mark.parametrize("server", [0, 3, None])
async def test_every_answer_names_its_api_server_if_there_are_several(server: int | None) -> None:
    async with limited(server) as http:
        answers = [await http.post(f"/{status}", headers={SERVER_HEADER: "7"}) for status in (200, 404, 503)]
        answers += [await http.post("/200", content=b"x" * (1 << 20 | 1)), await http.get("/stream")]
        answers.append(await http.get("/no/such/path"))
    assert [each.status_code for each in answers] == [200, 404, 503, 413, 200, 404]
    named = [] if server is None else [str(server)]
    assert all(each.headers.get_list(SERVER_HEADER) == named for each in answers)
    assert [each.headers.get("Retry-After") for each in answers] == [None, None, "1", None, None, None]
