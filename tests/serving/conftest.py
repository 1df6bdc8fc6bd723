"""The real server application over a scripted engine, and the official client on it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import httpx2
import openai
import pytest
import pytest_asyncio

from tests.support.scripted import ScriptedOmni

MODEL = "tiny"


def asking(app: Any) -> httpx.AsyncClient:
    """Return an HTTP client of an application, without a network."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://server", timeout=60)


async def disconnect(app: Any, engine: ScriptedOmni, path: str, body: dict[str, Any], script: Sequence[Any]) -> None:
    """Send a request and disconnect when the engine has answered `script`; all calls must end and no task be left."""
    waiting, sent = asyncio.Event(), False

    async def hang() -> None:
        waiting.set()
        await asyncio.Event().wait()

    async def receive() -> dict[str, Any]:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
        await waiting.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None: ...

    engine.script, engine.calls, tasks = [*script, hang, "never"], [], asyncio.all_tasks()
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "root_path": ""}
    scope |= {"asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "scheme": "http"}
    scope |= {"query_string": b"", "headers": [(b"content-type", b"application/json"), (b"host", b"server")]}
    await asyncio.wait_for(app(scope | {"client": ("c", 1), "server": ("server", 80)}, receive, send), timeout=10)
    for _ in range(20):  # work that a closed generator leaves to the event loop
        await asyncio.sleep(0)
    assert engine.calls and all(call.closed for call in engine.calls)
    assert asyncio.all_tasks() <= tasks


@pytest.fixture(scope="session")
def server_parts(tiny: Path) -> Iterator[tuple[ScriptedOmni, Any]]:
    """The scripted engine and the server's arguments."""
    from vllm.renderers.base import BaseRenderer
    from vllm.usage.usage_lib import UsageContext

    from vllm_omni_ext.cli.serve import prepare
    from vllm_omni_ext.runtime.launch.engine_args import stage_engine_args

    tools = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    plan, args = prepare(["serve", str(tiny), "--served-model-name", MODEL, "--disable-log-stats", *tools])
    first = plan.frontend().replicas[0].id
    config = stage_engine_args(plan, first).create_engine_config(UsageContext.OPENAI_API_SERVER)
    with pytest.MonkeyPatch.context() as patch:
        # An application that starts would compute features of the largest image, so that the first one is not late.
        patch.setattr(BaseRenderer, "warmup_mm", lambda renderer: None)
        yield ScriptedOmni(config, plan), args


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def app(server_parts: tuple[ScriptedOmni, Any]) -> Any:
    from vllm_omni_ext.serving.app import make_app

    return await make_app(*server_parts)


@pytest.fixture
def engine(server_parts: tuple[ScriptedOmni, Any]) -> ScriptedOmni:
    """The engine, with no script and no calls."""
    omni, _ = server_parts
    omni.script, omni.calls, omni.refusal = (), [], None
    return omni


@pytest_asyncio.fixture(loop_scope="session")
async def client(app: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    """The official client, without a network."""
    transport = httpx2.ASGITransport(app=app)
    async with openai.AsyncOpenAI(
        base_url="http://server/v1",
        api_key="none",
        max_retries=0,
        http_client=openai.DefaultAsyncHttpxClient(transport=transport),
    ) as made:
        yield made
