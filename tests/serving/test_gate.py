"""What is in front of every route."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import StreamingResponse

from vllm_omni_ext.serving.gate import SERVER_HEADER, RequestLimitMiddleware


def client(server: int | None) -> httpx.AsyncClient:
    app = FastAPI()

    @app.get("/stream")
    async def stream() -> StreamingResponse:
        return StreamingResponse(iter(["a", "b"]))

    @app.post("/{status}")
    async def answer(status: int, request: Request) -> dict[str, Any]:
        if status != 200:
            raise HTTPException(status)
        return {"size": len(await request.body())}

    app.add_middleware(RequestLimitMiddleware, max_body_mib=1, server=server)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://server")


@pytest.mark.parametrize("server", [0, 3, None])
async def test_every_answer_names_its_server_if_there_are_several(server: int | None) -> None:
    async with client(server) as asking:
        answers = [await asking.post(f"/{status}") for status in (200, 404, 503)]
        answers += [await asking.post("/200", content=b"x" * (1 << 20 | 1)), await asking.get("/stream")]
        answers.append(await asking.get("/no/such/path"))
    assert [each.status_code for each in answers] == [200, 404, 503, 413, 200, 404]
    named = None if server is None else str(server)
    assert {each.headers.get(SERVER_HEADER) for each in answers} == {named}


async def test_a_client_cannot_name_it() -> None:
    async with client(1) as asking:
        answer = await asking.post("/200", headers={SERVER_HEADER: "7"})
    assert answer.headers.get_list(SERVER_HEADER) == ["1"]


async def test_when_to_come_back() -> None:
    async with client(0) as asking:
        busy, fine = await asking.post("/503"), await asking.post("/404")
    assert busy.headers["Retry-After"] == "1" and "Retry-After" not in fine.headers
