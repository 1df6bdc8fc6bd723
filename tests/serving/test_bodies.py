"""Limits of bodies and errors in front of all routes, and headers of answers."""

from __future__ import annotations

import codecs
import json
import tracemalloc
from argparse import Namespace
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.routing import APIRoute
from hypothesis import given
from hypothesis import strategies as st

from tests.serving.conftest import asking
from tests.support.scripted import ScriptedOmni
from vllm_omni_ext.config.schema import Limits, OmniConfig
from vllm_omni_ext.serving.limits.bodies import (
    LONGEST_ERROR,
    MAX_DEPTH,
    SERVER_HEADER,
    BodyScan,
    RefusedBody,
    RequestLimits,
    refused_handler,
    shortened,
)

JSON = {"content-type": "application/json"}
PIECE = 1 << 16
CHAT = "/v1/chat/completions"
MIB = 1 << 20


def refused_field(body: bytes, most: int = Limits().max_body_values, piece: int = 1 << 20) -> str | None:
    """Return the parameter of the error for a body in pieces of that many bytes; None if the body is not refused."""
    scan = BodyScan(most)
    try:
        for start in range(0, len(body), piece):
            scan.feed(body[start : start + piece])
    except RefusedBody as error:
        assert error.detail.startswith(f"{error.parameter}: ")
        return error.parameter
    return None


def counted(value: Any) -> int:
    """Count the brackets, texts and commas of a value in JSON."""
    if isinstance(value, dict):
        inside = sum(1 + counted(each) for each in value.values())
        return 1 + max(0, len(value) - 1) + inside
    if isinstance(value, list):
        return 1 + max(0, len(value) - 1) + sum(map(counted, value))
    return isinstance(value, str)


def depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(depth, inner), default=0)


TEXTS = st.one_of(st.text(max_size=8), st.sampled_from(['"', "\\", '\\"', '{"', "[,", "\\\\", '":[{}],"', ""]))
BODIES = st.dictionaries(
    TEXTS.map("_".__add__),  # no field with a weight
    st.recursive(
        st.one_of(TEXTS, st.integers(), st.none(), st.booleans()),
        lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXTS, inner, max_size=4)),
        max_leaves=12,
    ),
    max_size=5,
)


@given(BODIES, st.integers(1, 40), st.booleans(), st.sampled_from([None, 2]))
def test_counts_are_those_of_the_parsed_body(body: dict[str, Any], piece: int, ascii: bool, indent: int | None) -> None:
    written = json.dumps(body, ensure_ascii=ascii, indent=indent).encode()
    assert refused_field(written, counted(body), piece) is None
    assert refused_field(written, counted(body) - 1, piece) is not None


@given(BODIES.filter(bool), st.integers(MAX_DEPTH - 6, MAX_DEPTH))
def test_levels_are_those_of_the_parsed_body(body: dict[str, Any], levels: int) -> None:
    nested = json.dumps({"_": body}).encode().replace(b'{"_"', b"[" * levels + b'{"_"', 1) + b"]" * levels
    assert (refused_field(nested) is None) == (levels + 1 + depth(body) <= MAX_DEPTH)


@pytest.mark.parametrize("piece", [1, 7, 1000])
@pytest.mark.parametrize(
    "key", ['"messages"', '"\\u006dessages"', '"mess\\u0061ges" \n', '"\\u006d\\u0065\\u0073\\u0073\\u0061\\u0067es"']
)
def test_escapes_in_the_name_of_a_field_are_decoded(key: str, piece: int) -> None:
    body = f'{{"a": [{{}}, {{}}, {{}}], {key}: [{{}}, {{}}, [1, [2]]], "b": [{{}}, {{}}, {{}}]}}'.encode()
    assert json.loads(body)["messages"]
    costs = 9, (1 + 8) * 5, 5 + 7  # a comma counts for the field before it
    assert refused_field(body, sum(costs), piece) is None
    assert refused_field(body, sum(costs) - 1, piece) == "b"
    assert refused_field(body, sum(costs[:2]) - 1, piece) == "messages"
    assert refused_field(body, 7, piece) == "a"


def test_long_keys_are_refused() -> None:
    for before in ("{", '{"messages": [{"role": "user"}], ', '{"prompt": "x" , \n'):
        assert refused_field(f'{before}"{"k" * 300_000}": 1}}'.encode()) == "body"
        assert refused_field(f'{before}"prompt": "{"k" * 300_000}"}}'.encode()) is None


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le"])
def test_other_encodings_than_utf_8_are_refused(encoding: str) -> None:
    body = '{"messages": "\u2222"}'.encode(encoding)
    assert json.loads(body) and refused_field(body) == "body"


@pytest.mark.parametrize(
    ("field", "fits", "refused"),
    [("x", 99_000, 101_000), ("messages", 19_000, 21_000), ("tools", 33_000, 34_000), ("prompt", 160_000, 170_000)],
)
def test_a_field_has_a_weight(field: str, fits: int, refused: int) -> None:
    for count, parameter in ((fits, None), (refused, field)):
        assert refused_field(many(f'{{"{field}": ', "{}", count, "}")) == parameter


def test_token_ids_count_a_fifth() -> None:
    body = {"x": [1] * 1000, "prompt": [1] * 100_000}
    assert refused_field(json.dumps(body).encode(), 22_000) is None
    assert refused_field(json.dumps(body).encode(), 20_000) == "prompt"
    assert refused_field(json.dumps(body | {"y": [1] * 1000}).encode(), 22_000) == "y"


@pytest.mark.slow
@pytest.mark.parametrize("text", ["\u4e16", "\U0001f389"])
@pytest.mark.parametrize("ascii", [False, True])
@pytest.mark.parametrize("after", [0, 8 * MIB, 16 * MIB])
def test_long_texts_beyond_ascii_have_a_limit(text: str, ascii: bool, after: int) -> None:
    long = "a" * after + text + "a" * (16 * MIB - after)
    assert refused_field(json.dumps({"messages": long}, ensure_ascii=ascii).encode()) == "messages"
    assert refused_field(json.dumps({"messages": [text, long.replace(text, "")]}, ensure_ascii=ascii).encode()) is None


def test_fields_of_too_many_bytes_are_refused() -> None:
    for body in ({"x": "b" * MIB, "z": 1}, {"z": 1, "x": ["c" * 1000] * 1100}, {"x": "b" * MIB}):
        assert refused_field(json.dumps(body).encode()) == "x"
        assert refused_field(json.dumps(body).replace('"x"', '"prompt"').encode()) is None
    assert refused_field(json.dumps({"model": "m" * 5000, "messages": []}).encode()) == "model"


def test_values_of_a_form_are_counted_together() -> None:
    """A key or a bracket of one field has no effect on the next field."""
    scan = BodyScan(46)
    values = {"a": '{"messages": [' + "[]," * 3, "b": '"x', "c": "}}}", "d": "[" + "[]," * 17 + "[]]"}
    for name, value in values.items():
        scan.begin_field(name)
        scan.feed(value.encode())
    with pytest.raises(RefusedBody) as refused:
        scan.begin_field("e")
        scan.feed(b"[[]]")
    assert refused.value.parameter == "e"


# -- through the server ----------------------------------------------------------------------------------------------


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
        answer = await send(app, path, many('{"model": "tiny", "messages": ', "{}", 21_000, "}"))
        assert (answer.status_code, answer.json()["error"]["param"]) == (413, "messages"), (path, answer.text)
    assert engine.calls == []


SHAPES: dict[str, tuple[str, bytes, str]] = {
    "parts": (CHAT, many('{"messages": [{"content": ', "{}", 200_000, "}]}"), "messages"),
    "tools": (CHAT, many('{"messages": [], "tools": ', "{}", 40_000, "}"), "tools"),
    "talker": (CHAT, many('{"messages": [], "talker": {"a": ', "1", 200_000, "}}"), "talker"),
    "depth": (CHAT, b'{"x": ' + b"[" * 5000 + b"]" * 5000 + b"}", "x"),
    "conversations": (f"{CHAT}/batch", many('{"messages": ', "[{}]", 14_000, "}"), "messages"),
    "ids": ("/v1/completions", many('{"prompt": ', "1", 1_100_000, "}"), "prompt"),
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

    inner.add_middleware(RequestLimits, config=OmniConfig(limits=Limits(max_body_values=500)))
    inner.add_exception_handler(RefusedBody, refused_handler)  # type: ignore[arg-type]
    body = many('{"messages": ', "{}", 1000, "}")
    wide = [body.decode().encode(encoding) for encoding in ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be")]
    for sent in (b" \n" + body, codecs.BOM_UTF8 + body, *wide, " \n".encode("utf-16-be") + wide[2]):
        answer = await send(inner, "/", sent, {"content-type": kind})
        assert answer.status_code == 413 and seen == [], sent[:20]
    form = b"--x\r\n" + b",[{" * 100_000
    answer = await send(inner, "/", form, {"content-type": kind})
    is_form = kind.startswith("multi") or "form" in kind
    assert (answer.status_code, seen) == ((200, [form]) if is_form else (413, []))


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


def limited(server: int | None, *, wrapped: bool = False) -> httpx.AsyncClient:
    """Return a client of an application with a limit of 1 MiB; `wrapped`: with a function as middleware."""
    inner = FastAPI()
    if wrapped:
        inner.middleware("http")(lambda request, call_next: call_next(request))

    @inner.get("/stream")
    async def stream() -> StreamingResponse:
        return StreamingResponse(iter(["a", "b"]))

    @inner.get("/{status}/{size}")
    async def failure(status: int, size: int) -> JSONResponse:
        return JSONResponse({"error": {"message": "x" * size, "param": "y" * size, "code": status}}, status)

    @inner.post("/{status}")
    async def answer(status: int, request: Request) -> dict[str, Any]:
        if status != 200:
            raise HTTPException(status)
        return {"size": len(await request.body())}

    inner.add_middleware(RequestLimits, config=OmniConfig(limits=Limits(max_body_mib=1)), server=server)
    return asking(inner)


@pytest.mark.parametrize("wrapped", [False, True])
async def test_a_refused_body_has_the_same_answer_with_any_middleware(wrapped: bool) -> None:
    """Starlette converts an error that comes through a function as middleware."""
    async with limited(None, wrapped=wrapped) as http:
        for body in (b"x" * (1 << 20 | 1), many("", "[],", 400_000, "")):
            answer = await http.post("/200", content=body)
            assert answer.status_code == 413 and answer.json()["error"]["param"] == "body"
        assert (await http.post("/200", content=b"x")).json() == {"size": 1}


@pytest.mark.parametrize("expect", [False, True])
async def test_a_body_is_received_before_it_is_refused(expect: bool) -> None:
    """A client that sends it reads no response before. With `Expect: 100-continue` it sends nothing."""
    received, sent = [], []

    async def receive() -> dict[str, Any]:
        received.append(1)
        return {"type": "http.request", "body": bytes(1 << 20), "more_body": len(received) < 5}

    async def send(message: Any) -> None:
        sent.append((message["type"], message.get("status"), len(received)))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()

    limits = RequestLimits(app, config=OmniConfig(limits=Limits(max_body_mib=1)))
    headers = [(b"content-length", b"%d" % (5 << 20)), *([(b"expect", b"100-continue")] if expect else [])]
    await limits({"type": "http", "headers": headers}, receive, send)  # type: ignore[arg-type]
    assert sent[0] == ("http.response.start", 413, 0 if expect else 5)


class Counted:
    """Middleware of a user that counts how often it is constructed."""

    made = 0

    def __init__(self, app: Any) -> None:
        Counted.made += 1
        self._inner = app

    async def __call__(self, *given: Any) -> None:
        await self._inner(*given)


async def test_middleware_is_constructed_once(server_parts: tuple[ScriptedOmni, Any]) -> None:
    """Some register metrics then, as vLLM's own: a second time they would count nothing."""
    from vllm_omni_ext.serving.app import make_app

    omni, args = server_parts
    app = await make_app(omni, Namespace(**{**vars(args), "middleware": [f"{__name__}.Counted"]}))
    async with asking(app) as http:
        assert (await http.get("/v1/models")).status_code == 200
    assert Counted.made == 1


async def test_only_long_errors_are_cut() -> None:
    async with limited(None) as http:
        long, short, fine = [await http.get(path) for path in ("/400/100000", "/400/5000", "/200/100000")]
    assert long.status_code == 400 and len(long.content) < LONGEST_ERROR
    assert int(long.headers["content-length"]) == len(long.content)
    assert long.json()["error"]["code"] == 400 and long.json()["error"]["param"].startswith("yyy")
    assert len(short.json()["error"]["message"]) == 5000 and len(fine.json()["error"]["message"]) == 100_000
    for body in (b"[1, 2]", b'{"status": "unhealthy"}', b'{"error": "x"}', b"x"):
        assert shortened(body) == body


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
