"""Requests of this process to its own HTTP application, without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

import httpx
from starlette.types import ASGIApp, Receive, Scope, Send

LEAVE_S = 5.0
"""Seconds that a handler has to end after its client has left; then it is cancelled."""


class InProcess(httpx.AsyncBaseTransport):
    """Calls an application; a cancelled request is one whose client has left.

    vLLM's handlers abort a request when its client has left. They do not when their own task is cancelled, which is all
    that httpx's transport for applications does.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def _call(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Return the response with its whole body; status 500 without one."""
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
