"""Which requests need the API key, on the real server application."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.support.scripted import ScriptedOmni
from vllm_omni_ext.config.schema import VLLM_ROUTES

KEY = "a-key"
FREE = {"/health", "/health/live", "/health/ready", "/health/startup", "/ping", "/metrics"}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "modalities": ["text"]}
PREFLIGHT = {"Origin": "http://page", "Access-Control-Request-Method": "POST"}


async def locked(parts: tuple[ScriptedOmni, Any], **changes: Any) -> Any:
    """The application with an API key; `changes` are settings of the stage config."""
    from vllm_omni_ext.serving.app import make_app

    omni, stock = parts
    args, other = copy.copy(stock), copy.copy(omni)
    args.api_key, args.allowed_origins, args.root_path = [KEY, "another"], ["*"], changes.pop("root_path", "")
    other.plan = replace(omni.plan, config=replace(omni.plan.config, **changes))
    return await make_app(other, args)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def strict(server_parts: tuple[ScriptedOmni, Any]) -> Any:
    return await locked(server_parts)


def asking(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://server")


async def status_of(app: Any, path: str, *, method: str = "GET", kind: str = "http", root_path: str = "") -> int:
    """What is answered to a path that no HTTP client would send as it is."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {
        "type": kind,
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "root_path": root_path,
        "query_string": b"",
        "headers": [],
        "http_version": "1.1",
        "scheme": "http",
        "server": ("server", 80),
        "client": ("client", 1),
    }
    await app(scope, receive, send)
    return int(sent[0]["status"])


def routes_of(app: Any) -> list[tuple[str, str]]:
    """Every method and path of an application."""
    flat = [(method, route.path) for route in app.routes for method in getattr(route, "methods", None) or ["GET"]]
    assert {("POST", "/invocations"), ("POST", "/tokenize"), ("GET", "/load"), ("GET", "/docs")} <= set(flat)
    assert ("GET", "/v1/omni/status") in flat and ("POST", "/v1/audio/speech") in flat
    return flat


async def test_every_route_but_those_for_machines_needs_the_key(strict: Any) -> None:
    async with asking(strict) as client:
        for method, path in routes_of(strict):
            answer = await client.request(method, path)
            assert (answer.status_code == 401) == (path not in FREE), (method, path, answer.status_code)


async def test_the_refusal_has_the_shape_of_other_errors(strict: Any) -> None:
    async with asking(strict) as client:
        refused = await client.post("/invocations", json=CHAT)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["type"]) == (401, 401, "AuthenticationError")
    assert "Authorization: Bearer" in error["message"] and KEY not in refused.text
    assert refused.headers["WWW-Authenticate"] == "Bearer"


@pytest.mark.parametrize("said", ["Bearer", "Bearer ", "Bearer  a-key", "Basic a-key", "a-key", "Bearer A-KEY", "é"])
async def test_what_is_no_key(strict: Any, said: str) -> None:
    async with asking(strict) as client:
        answer = await client.get("/version", headers={"Authorization": said.encode()})
    assert answer.status_code == 401


@pytest.mark.parametrize("said", ["Bearer a-key", "bearer a-key", "Bearer another"])
async def test_the_key_opens_every_route(strict: Any, said: str) -> None:
    headers = {"Authorization": said}
    async with asking(strict) as client:
        models = await client.get("/v1/models", headers=headers)
        tokens = await client.post("/tokenize", json={"prompt": "hello"}, headers=headers)
        docs = await client.get("/openapi.json", headers=headers)
    assert [each.status_code for each in (models, tokens, docs)] == [200, 200, 200]


TRICKS = ["//health", "/health/../version", "/HEALTH/version", "/health/x", "/health%2f..%2fversion", "/metrics/x"]
TRICKS += ["/x/health", "/health;/version", "/health\x00", "health", "/./version", "//version", "/V1/models", "/v1//x"]
TRICKS += ["/Version", "/version/", "", "/", "/pingx", "/ping//"]


@pytest.mark.parametrize("path", TRICKS)
async def test_tricks_with_the_path(strict: Any, path: str) -> None:
    assert await status_of(strict, path) == 401


@pytest.mark.parametrize("method", ["OPTIONS", "HEAD", "BREW", "get"])
async def test_tricks_with_the_method(strict: Any, method: str) -> None:
    assert await status_of(strict, "/version", method=method) == 401


async def test_a_websocket_needs_the_key_whatever_its_path_is(strict: Any) -> None:
    assert await status_of(strict, "/v1/realtime", kind="websocket") == 401
    assert await status_of(strict, "/health", kind="websocket") == 401


async def test_a_browser_may_ask_before_without_the_key(strict: Any) -> None:
    async with asking(strict) as client:
        allowed = await client.options("/v1/chat/completions", headers=PREFLIGHT)
        half = await client.options("/v1/chat/completions", headers={"Origin": "http://page"})
    assert (allowed.status_code, half.status_code) == (200, 401), allowed.text
    assert "Access-Control-Allow-Origin" in allowed.headers


async def test_a_server_behind_a_prefix(server_parts: tuple[ScriptedOmni, Any]) -> None:
    app = await locked(server_parts, root_path="/api")
    async with asking(app) as client:
        for path, free in (
            ("/api/metrics", True),
            ("/metrics", True),
            ("/api/version", False),
            ("/api/api/metrics", False),
        ):
            assert ((await client.get(path)).status_code == 200) == free, path


async def test_vllms_own_rule(server_parts: tuple[ScriptedOmni, Any]) -> None:
    app = await locked(server_parts, api_key_routes=VLLM_ROUTES)
    async with asking(app) as client:
        assert (await client.get("/version")).status_code == 200
        refused = await client.get("/v1/models")
    assert (refused.status_code, refused.json()) == (401, {"error": "Unauthorized"})


async def test_without_a_key_nothing_is_refused(app: Any) -> None:
    async with asking(app) as client:
        for path in ("/version", "/v1/models", "/v1/omni/status"):
            assert (await client.get(path)).status_code != 401, path
