"""`/v1/files` and `/v1/batches` with the official client, on the real server application."""

from __future__ import annotations

import asyncio
import copy
import json
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import httpx2
import openai
import pytest
import pytest_asyncio

from tests.serving.conftest import asking
from tests.support.scripted import ScriptedOmni, sound
from vllm_omni_ext.batch.lines import PRIORITY_HEADER
from vllm_omni_ext.config.schema import Limits
from vllm_omni_ext.orchestrator.admission import PRIORITY

pytestmark = pytest.mark.slow

MODEL, KEY = "tiny", "a-key"
CHAT, SPEECH = "/v1/chat/completions", "/v1/audio/speech"
MESSAGES = [{"role": "user", "content": "Hello"}]
WINDOW: Any = "24h"


@dataclass
class Service:
    """An API server with batches."""

    app: Any
    engine: Any
    client: openai.AsyncOpenAI
    http: httpx.AsyncClient

    async def batch(self, *lines: Any, endpoint: Any = CHAT, **fields: Any) -> Any:
        """Upload bodies of requests as `l0`, `l1`, ..., and create a batch."""
        written = [
            {"custom_id": f"l{number}", "method": "POST", "url": endpoint, "body": {"model": MODEL, **body}}
            for number, body in enumerate(lines)
        ]
        data = "\n".join(map(json.dumps, written)).encode()
        file = await self.client.files.create(file=("in.jsonl", data), purpose="batch")
        return await self.client.batches.create(
            input_file_id=file.id, endpoint=endpoint, completion_window=WINDOW, **fields
        )

    async def until(self, batch: Any, holds: Callable[[Any], Any]) -> Any:
        async with asyncio.timeout(30):
            while not holds(found := await self.client.batches.retrieve(batch.id)):
                await asyncio.sleep(0.1)
        return found

    async def output(self, file_id: str) -> dict[str, Any]:
        content = await self.client.files.content(file_id)
        lines = map(json.loads, content.text.splitlines())
        return {line["custom_id"]: line for line in lines}


@pytest_asyncio.fixture(loop_scope="session")
async def service(server_parts: tuple[ScriptedOmni, Any], tmp_path: Path) -> AsyncIterator[Service]:
    from vllm_omni_ext.serving.app import make_app

    omni, stock = server_parts
    args, engine = copy.copy(stock), copy.copy(omni)
    args.api_key = [KEY]
    sizes = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=4))
    engine.connections = SimpleNamespace(**vars(ScriptedOmni.connections), configs={"thinker": sizes})
    engine.calls, engine.at_stop, engine.script = [], [], ["Hi", " there"]
    limits = Limits(max_batch_files_mib=1)
    engine.plan = replace(omni.plan, config=replace(omni.plan.config, batch_dir=str(tmp_path), limits=limits))
    app = await make_app(engine, args)
    app.state.omni_batches.start()
    transport = httpx2.ASGITransport(app=app)
    client = openai.AsyncOpenAI(
        base_url="http://server/v1",
        api_key=KEY,
        max_retries=0,
        http_client=openai.DefaultAsyncHttpxClient(transport=transport),
    )
    async with client, asking(app) as http:
        http.headers["Authorization"] = f"Bearer {KEY}"
        yield Service(app, engine, client, http)
    for stop in engine.at_stop:
        stop()


@pytest.mark.asyncio(loop_scope="session")
async def test_a_batch_of_chats(service: Service) -> None:
    batch = await service.batch({"messages": MESSAGES}, {"messages": "none"}, {}, metadata={"night": "1"})
    assert (batch.status, batch.metadata, batch.completion_window) == ("validating", {"night": "1"}, "24h")
    found = await service.until(batch, lambda batch: batch.status == "completed")
    assert (found.request_counts.total, found.request_counts.completed, found.request_counts.failed) == (3, 1, 2)
    (good,) = (await service.output(found.output_file_id)).values()
    assert good["custom_id"] == "l0" and good["error"] is None
    assert good["response"]["body"]["choices"][0]["message"]["content"] == "Hi there"
    errors = await service.output(found.error_file_id)
    assert {name: line["response"]["status_code"] for name, line in errors.items()} == {"l1": 400, "l2": 400}
    assert [each.id async for each in service.client.batches.list(limit=1)] == [batch.id]
    files = [each async for each in service.client.files.list(limit=1)]
    assert {each.purpose for each in files} == {"batch", "batch_output"} and len(files) == 3
    assert [each.id async for each in service.client.files.list(purpose="batch")] == [batch.input_file_id]
    for each in files:
        assert (await service.client.files.delete(each.id)).deleted
    assert (await service.client.batches.retrieve(batch.id)).output_file_id is None


@pytest.mark.asyncio(loop_scope="session")
async def test_sound_is_in_base64(service: Service) -> None:
    service.engine.script = [sound(2400, frames=1, finished=True)]
    batch = await service.batch({"input": "hello", "response_format": "wav"}, endpoint=SPEECH)
    found = await service.until(batch, lambda batch: batch.status == "completed")
    body = (await service.output(found.output_file_id))["l0"]["response"]["body"]
    assert body["content_type"] == "audio/wav" and body["data"].startswith("UklGR")


@pytest.mark.asyncio(loop_scope="session")
async def test_lines_have_a_lower_priority_than_requests_of_clients(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, release = [], asyncio.Event()
    generate = type(service.engine).generate

    def noted(engine: Any, *args: Any, **stock: Any) -> Any:
        seen.append((PRIORITY.get(), stock.get("priority")))
        return generate(engine, *args, **stock)

    monkeypatch.setattr(type(service.engine), "generate", noted)
    service.engine.script = [release.wait, "late"]
    batch = await service.batch(*[{"messages": MESSAGES}] * 9)
    async with asyncio.timeout(30):
        while len(seen) < 2:
            await asyncio.sleep(0)
    for _ in range(100):
        await asyncio.sleep(0)
    assert seen == [(1, 1)] * 2, "half of the engine's places"
    service.engine.script = ["soon"]
    live = await service.client.chat.completions.create(model=MODEL, messages=MESSAGES)  # type: ignore[arg-type]
    assert live.choices[0].message.content == "soon" and seen[2] == (0, 0)
    assert (await service.client.batches.retrieve(batch.id)).request_counts.completed == 0
    release.set()
    found = await service.until(batch, lambda batch: batch.status == "completed")
    assert found.request_counts.completed == 9


@pytest.mark.asyncio(loop_scope="session")
async def test_a_batch_is_cancelled_and_one_that_has_ended_is_not(service: Service) -> None:
    service.engine.script = [asyncio.Event().wait, "never"]
    batch = await service.batch({"messages": MESSAGES}, {"messages": MESSAGES})
    with pytest.raises(openai.ConflictError, match="has not ended"):
        await service.client.files.delete(batch.input_file_id)
    await service.until(batch, lambda batch: batch.status == "in_progress")
    assert (await service.client.batches.cancel(batch.id)).status == "cancelling"
    found = await service.until(batch, lambda batch: batch.status == "cancelled")
    assert found.cancelling_at and found.cancelled_at and found.output_file_id is None
    assert all(call.closed for call in service.engine.calls)
    with pytest.raises(openai.ConflictError, match="status is cancelled"):
        await service.client.batches.cancel(batch.id)


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("order", ["asc", "desc"])
async def test_objects_that_are_deleted_while_a_client_pages_skip_no_others(service: Service, order: Any) -> None:
    files = service.client.files
    ids = [(await files.create(file=("in.jsonl", b"{}\n"), purpose="batch")).id for _ in range(5)]
    seen = []
    async for each in files.list(limit=2, order=order):
        seen.append(each.id)
        await files.delete(each.id)
    assert seen == (ids if order == "asc" else ids[::-1])
    for path in ("/v1/files?after=batch-", "/v1/batches?after=file-"):
        assert (await service.http.get(path + "0" * 32)).json()["error"]["param"] == "after"
    empty = (await service.http.get("/v1/batches?after=batch-" + "0" * 32)).json()
    assert (empty["data"], empty["has_more"]) == ([], False)


@pytest.mark.asyncio(loop_scope="session")
async def test_a_file_that_is_deleted_during_its_download_is_404_or_whole(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, data = service.app.state.omni_batches.store, b"{}\n" * 100_000
    read, opened = store.file, store.open
    for method, result in (("file", 404), ("open", 200)):
        file_id = (await service.client.files.create(file=("in.jsonl", data), purpose="batch")).id

        def then_delete(name: str, method: str = method) -> Any:
            found = {"file": read, "open": opened}[method](name)
            monkeypatch.undo()
            store.delete_file(name)
            return found

        monkeypatch.setattr(store, method, then_delete)
        answer = await service.http.get(f"/v1/files/{file_id}/content")
        assert answer.status_code == result and (result == 404 or answer.content == data)
    file_id = (await service.client.files.create(file=("in.jsonl", b"0123"), purpose="batch")).id
    answer = await service.http.get(f"/v1/files/{file_id}/content", headers={"Range": "bytes=1-2"})
    assert (answer.status_code, answer.content) == (206, b"12")
    open_files = map(os.path.realpath, Path("/dev/fd").iterdir())
    assert not [path for path in open_files if path.startswith(f"{store.folder}/files/")]


WRONG_BATCHES = [
    ({"input_file_id": None}, "input_file_id"),
    ({"input_file_id": "\ud800"}, "input_file_id"),
    ({"endpoint": "/v1/batches"}, "endpoint"),
    ({"endpoint": ["x"]}, "endpoint"),
    ({"completion_window": "0h"}, "completion_window"),
    ({"completion_window": "337h"}, "completion_window"),
    ({"completion_window": None}, "completion_window"),
    ({"metadata": []}, "metadata"),
    ({"metadata": {"a": 1}}, "metadata"),
    ({"metadata": {"a": "\ud800"}}, "metadata"),
    ({"metadata": {"\ud800": "a"}}, "metadata"),
    ({"metadata": {"a": "x" * 513}}, "metadata"),
    ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
    ({"output_expires_after": {}}, "output_expires_after"),
]


@pytest.mark.asyncio(loop_scope="session")
async def test_wrong_requests_are_named(service: Service) -> None:
    http, good = service.http, {"input_file_id": "file-" + "0" * 32, "endpoint": CHAT, "completion_window": "24h"}

    async def problem(answer: Any) -> tuple[int, str | None]:
        error = (await answer).json()["error"]
        return error["code"], error["param"]

    for changes, parameter in WRONG_BATCHES:
        sent = http.post("/v1/batches", content=json.dumps(good | changes))
        assert await problem(sent) == (400, parameter), changes
    assert await problem(http.post("/v1/batches", json=[])) == (400, "body")
    assert await problem(http.post("/v1/batches", content=b"{")) == (400, "body")
    assert (await problem(http.post("/v1/batches", json=good)))[0] == 404
    upload = {"file": ("in.jsonl", b"{}\n")}
    for data, files, parameter in (
        ({"purpose": "vision"}, upload, "purpose"),
        ({"purpose": "batch"}, {"file": ("in.jsonl", b"")}, "file"),
        ({"purpose": "batch", "file": "text"}, {"other": ("x", b"x")}, "other"),
        ({"purpose": "batch", "expires_after[seconds]": "3600"}, upload, "expires_after[seconds]"),
    ):
        sent = http.post("/v1/files", data=data, files=files)
        assert await problem(sent) == (400, parameter)
    assert await problem(http.post("/v1/files", json={})) == (400, "file")
    for query, parameter in (("limit=0", "limit"), ("limit=x", "limit"), ("after=x", "after"), ("x=1", "x")):
        for path in ("/v1/files", "/v1/batches"):
            assert await problem(http.get(f"{path}?{query}")) == (400, parameter)
    assert await problem(http.get("/v1/files?order=up")) == (400, "order")
    assert await problem(http.get("/v1/files?purpose=vision")) == (400, "purpose")
    for path in ("/v1/files/x", "/v1/files/..%2Fx/content", "/v1/batches/batch-1"):
        assert (await http.get(path)).status_code == 404
    assert (
        (await http.delete("/v1/files/x")).status_code == (await http.post("/v1/batches/x/cancel")).status_code == 404
    )
    large = {"file": ("in.jsonl", bytes(1 << 20) + b"x")}
    assert (await problem(http.post("/v1/files", data={"purpose": "batch"}, files=large)))[0] == 413
    assert await problem(http.post(CHAT, json={}, headers={PRIORITY_HEADER: "high"})) == (400, PRIORITY_HEADER)


@pytest.mark.asyncio(loop_scope="session")
async def test_the_routes_need_the_key_and_exist_with_a_folder_only(service: Service, app: Any) -> None:
    async with asking(service.app) as http:
        for path in ("/v1/files", "/v1/batches"):
            assert (await http.get(path)).status_code == 401
    async with asking(app) as http:
        for path in ("/v1/files", "/v1/batches"):
            assert (await http.get(path)).status_code == 404
            assert (await http.post(path)).status_code == 404
