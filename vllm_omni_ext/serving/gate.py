"""Middleware in front of every route: a size limit for request bodies, and `Retry-After` headers of a busy server."""

from __future__ import annotations

from http import HTTPStatus

from fastapi import HTTPException
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_omni_ext.serving.pixels import BUDGET, PixelBudget

RETRY_AFTER_S = 1
BUSY = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
MIB = 1 << 20
SERVER_HEADER = "X-Api-Server"


class RequestLimitMiddleware:
    """ASGI middleware.

    Args:
        server: number of this API server, which becomes a response header; None: there is only one API server.
        max_body_mib: largest request body; a larger one gets status 413 before all of it was read.
        max_request_pixels: limit for all images of a request together; None: no limit.
    """

    def __init__(
        self, app: ASGIApp, *, max_body_mib: int, max_request_pixels: int | None = None, server: int | None = None
    ) -> None:
        self._app = app
        self._server = server
        self._most = max_body_mib * MIB
        self._pixels = max_request_pixels
        self._too_large = f"the body of a request may have {max_body_mib} MiB (max_body_mib of the stage config)"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._pixels is not None:
            BUDGET.set(PixelBudget(self._pixels))
        declared = Headers(scope=scope).get("content-length", "")
        due = int(declared) if declared.isdecimal() else 0
        received = 0

        async def limited() -> Message:
            nonlocal received
            if due > self._most:
                raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, self._too_large)
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._most:
                raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, self._too_large)
            return message

        async def hinted(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                if message["status"] in BUSY:
                    headers.setdefault("Retry-After", str(RETRY_AFTER_S))
                if self._server is not None:
                    headers[SERVER_HEADER] = str(self._server)
            await send(message)

        await self._app(scope, limited, hinted)
