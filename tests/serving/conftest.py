"""The real server application over a scripted engine, and the official client on it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import pytest_asyncio

from tests.support.scripted import ScriptedOmni

MODEL = "tiny"


@pytest.fixture(scope="session")
def server_parts(tiny: Path) -> Iterator[tuple[ScriptedOmni, Any]]:
    """The scripted engine and the server's arguments."""
    from vllm.renderers.base import BaseRenderer
    from vllm.usage.usage_lib import UsageContext

    from vllm_omni_ext.cli.serve import prepare
    from vllm_omni_ext.runtime.launch.engine_args import stage_engine_args

    plan, args = prepare(["serve", str(tiny), "--served-model-name", MODEL, "--disable-log-stats"])
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
