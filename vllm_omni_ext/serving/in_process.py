"""Sends HTTP requests, e.g. of batches, to the HTTP application of this process, without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

import httpx
from starlette.types import ASGIApp, Receive, Scope, Send

LEAVE_S = 5.0
"""Seconds that a handler has to end after a request was cancelled; then the handler's task is cancelled."""


class InProcess(httpx.AsyncBaseTransport):
    """httpx transport that calls an ASGI application. A cancelled request becomes an `http.disconnect` message.

    At this message, vLLM's handlers abort the engine request. They do not abort it when their own task is cancelled, as
    httpx's `ASGITransport` does.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def _call(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Return the application's response with its whole body; status 500 if the application sends none or fails."""
        body: bytes | None = await request.aread()
        left = asyncio.Event()
        messages: list[MutableMapping[str, Any]] = []

        async def receive() -> MutableMapping[str, Any]:
            nonlocal body
            if body is None:
                await left.wait()
                return {"type": "http.disconnect"}
            whole, body = body, None
            return {"type": "http.request", "body": whole, "more_body": False}

        async def send(message: MutableMapping[str, Any]) -> None:
            messages.append(message)

        handler = asyncio.create_task(self._call(_scope(request), receive, send))
        try:
            await asyncio.wait([handler])
        except asyncio.CancelledError:
            left.set()
            _, running = await asyncio.wait([handler], timeout=LEAVE_S)
            for task in running:
                task.cancel()
            raise
        if handler.exception() is not None or not messages:  # logged by vLLM's handler of errors
            return httpx.Response(500)
        return httpx.Response(
            messages[0]["status"],
            headers=messages[0].get("headers", []),
            content=b"".join(message.get("body", b"") for message in messages[1:]),
        )


def _scope(request: httpx.Request) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": request.method,
        "headers": [(name.lower(), value) for name, value in request.headers.raw],
        "scheme": request.url.scheme,
        "path": request.url.path,
        "raw_path": request.url.raw_path.partition(b"?")[0],
        "query_string": request.url.query,
        "server": (request.url.host, request.url.port),
        "client": ("batch", 0),
        "root_path": "",
    }
