"""What `/v1/omni/status` and the trace endpoint say, on the real server application."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tests.support.scripted import ScriptedOmni
from vllm_omni_ext.config.parse import Names, parse_config
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.model_plugins.qwen3_omni.family import QWEN3_OMNI
from vllm_omni_ext.observability.request_trace import RequestTrace
from vllm_omni_ext.observability.trace_files import TraceFiles
from vllm_omni_ext.serving.gate import SERVER_HEADER
from vllm_omni_ext.topology.plan import make_plan
from vllm_omni_ext.wire.control import Server


@pytest.fixture
def omni(engine: ScriptedOmni, tmp_path: Path) -> Iterator[Any]:
    """One of several API servers, without any replica."""
    made: Any = engine
    made.replica_connections = SimpleNamespace(servers=(), replica_names=lambda stage: [], watcher=None)
    made.connections = SimpleNamespace(client_index=1, client_count=2, started=time.time(), board=None)
    made.trace_files = TraceFiles(tmp_path, 1, keep=2)
    yield made
    del made.replica_connections, made.connections
    made.trace_files = None


async def get(app: Any, path: str) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://server") as asking:
        return await asking.get(path)


@pytest.mark.asyncio(loop_scope="session")
async def test_api_servers(app: Any, omni: Any) -> None:
    alone = (await get(app, "/v1/omni/status")).json()["api_servers"]
    assert alone == [{"index": 1, "pid": os.getpid(), "state": "UP", "restarts": 0}]
    omni.replica_connections.servers = (Server(0, 11, False, 2), Server(1, 12, True, 0))
    assert (await get(app, "/v1/omni/status")).json()["api_servers"] == [
        {"index": 0, "pid": 11, "state": "DOWN", "restarts": 2},
        {"index": 1, "pid": 12, "state": "UP", "restarts": 0},
    ]


@pytest.mark.asyncio(loop_scope="session")
async def test_the_coordinator_and_its_process(app: Any, omni: Any) -> None:
    views: list[Any] = [None, SimpleNamespace(pid=0), SimpleNamespace(pid=4711)]
    said = []
    for view in views:
        omni.replica_connections.watcher = SimpleNamespace(view=view, fresh=view is not None, age=lambda: 0.25)
        said.append((await get(app, "/v1/omni/status")).json()["coordinator"])
    assert [each["pid"] for each in said] == [None, None, 4711]
    assert said[2] == {"state": "UP", "pid": 4711, "view_age_s": 0.25}


@pytest.mark.asyncio(loop_scope="session")
async def test_a_trace_of_another_server(app: Any, omni: Any, tmp_path: Path) -> None:
    missing = await get(app, "/v1/omni/trace/chatcmpl-1")
    assert missing.status_code == 404 and missing.json()["error"]["param"] == "request_id"
    record = RequestTrace("chatcmpl-1", ("text",), 0.0, time.time(), None, set(), ended=1.0, outcome="finished")
    TraceFiles(tmp_path, 0, keep=2).write(record)
    found = await get(app, "/v1/omni/trace/chatcmpl-1")
    assert found.status_code == 200 and found.headers["content-type"] == "application/json"
    assert found.json()["otherData"]["request_id"] == "chatcmpl-1"


@pytest.mark.asyncio(loop_scope="session")
async def test_one_server_alone_does_not_name_itself(app: Any, omni: Any) -> None:
    assert SERVER_HEADER not in (await get(app, "/v1/omni/status")).headers


@pytest.mark.asyncio(loop_scope="session")
async def test_which_replicas_compute_prompts_for_which(app: Any, omni: Any) -> None:
    assert (await get(app, "/v1/omni/status")).json()["kv_edges"] == []
    plan, pipeline = omni.plan, QWEN3_OMNI
    source, target = "thinker.prefill", "thinker.decode"
    config = parse_config({"stages": {"thinker": {"prefill_decode": {}}}}, Names(stages=("thinker",)))
    omni.plan = make_plan(model="m", pipeline=pipeline, config=config, text_args={}, machine=plan.machine)
    pair = SimpleNamespace(source=ReplicaId(source, 0), target=ReplicaId(target, 1), handed=3, fetching=1)
    omni.orchestrator = SimpleNamespace(pairs=lambda: [pair], pools=omni.orchestrator.pools)
    try:
        assert (await get(app, "/v1/omni/status")).json()["kv_edges"] == [
            {
                "source": source,
                "target": target,
                "connector": "mooncake",
                "pairs": [{"source": f"{source}/0", "target": f"{target}/1", "handed": 3, "fetching": 1}],
            }
        ]
    finally:
        omni.plan = plan
        del omni.orchestrator
