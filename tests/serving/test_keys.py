"""Requests that need the API key, on the real server application."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from tests.serving.conftest import asking
from tests.support.scripted import ScriptedOmni
from vllm_omni_ext.config.schema import VLLM_ROUTES

KEY = "a-key"
FREE = {"/health", "/health/live", "/health/ready", "/health/startup", "/ping", "/metrics"}
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


async def status_of(app: Any, path: str, method: str = "GET", kind: str = "http") -> int:
    """Return the status of a request that an HTTP client would not send as it is."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {"type": kind, "method": method, "path": path, "raw_path": path.encode(), "root_path": "", "headers": []}
    scope |= {"query_string": b"", "http_version": "1.1", "scheme": "http", "server": ("server", 80)}
    await app(scope, receive, send)
    return int(sent[0]["status"])


async def test_all_routes_but_probes_and_metrics_need_the_key(strict: Any) -> None:
    routes = [(method, each.path) for each in strict.routes for method in getattr(each, "methods", None) or ["GET"]]
    assert {("POST", "/invocations"), ("POST", "/tokenize"), ("GET", "/docs"), ("GET", "/v1/omni/status")} <= {*routes}
    async with asking(strict) as client:
        for method, path in routes:
            answer = await client.request(method, path)
            assert (answer.status_code == 401) == (path not in FREE), (method, path, answer.status_code)
        refused = await client.post("/invocations", json={})
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["type"]) == (401, 401, "AuthenticationError")
    assert "Authorization: Bearer" in error["message"] and KEY not in refused.text
    assert refused.headers["WWW-Authenticate"] == "Bearer"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("said", "status"),
    [
        *((said, 401) for said in ("Bearer", "Bearer ", "Bearer  a-key", "Basic a-key", "a-key", "Bearer A-KEY", "é")),
        *((said, 200) for said in ("Bearer a-key", "bearer a-key", "Bearer another")),
    ],
)
async def test_only_the_key_opens_a_route(strict: Any, said: str, status: int) -> None:
    async with asking(strict) as client:
        for path in ("/version", "/v1/models", "/openapi.json"):
            assert (await client.get(path, headers={"Authorization": said.encode()})).status_code == status


PATHS = ["//health", "/health/../version", "/HEALTH/version", "/health/x", "/health%2f..%2fversion", "/metrics/x"]
PATHS += ["/x/health", "/health;/version", "/health\x00", "health", "//version", "/version/", "", "/", "/ping//"]


@pytest.mark.parametrize(
    ("path", "method", "kind"),
    [
        *((path, "GET", "http") for path in PATHS),
        *(("/version", method, "http") for method in ("OPTIONS", "HEAD", "BREW", "get")),
        *((path, "GET", "websocket") for path in ("/v1/realtime", "/health")),
    ],
)
async def test_unusual_paths_methods_and_websockets_need_the_key(
    strict: Any, path: str, method: str, kind: str
) -> None:
    assert await status_of(strict, path, method, kind) == 401


async def test_a_preflight_of_a_browser_needs_no_key(strict: Any) -> None:
    async with asking(strict) as client:
        allowed = await client.options("/v1/chat/completions", headers=PREFLIGHT)
        half = await client.options("/v1/chat/completions", headers={"Origin": "http://page"})
    assert (allowed.status_code, half.status_code) == (200, 401), allowed.text
    assert "Access-Control-Allow-Origin" in allowed.headers


async def test_open_paths_are_those_behind_the_root_path(server_parts: tuple[ScriptedOmni, Any]) -> None:
    app = await locked(server_parts, root_path="/api")
    statuses = {"/api/metrics": 200, "/metrics": 200, "/api/version": 401, "/api/api/metrics": 401}
    async with asking(app) as client:
        assert {path: (await client.get(path)).status_code for path in statuses} == statuses


async def test_vllms_rule_can_be_chosen(server_parts: tuple[ScriptedOmni, Any]) -> None:
    app = await locked(server_parts, api_key_routes=VLLM_ROUTES)
    async with asking(app) as client:
        assert (await client.get("/version")).status_code == 200
        refused = await client.get("/v1/models")
    assert (refused.status_code, refused.json()) == (401, {"error": "Unauthorized"})
