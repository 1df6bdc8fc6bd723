"""Checks every request body against the limits of `BodyScan`, before a route reads it."""

from __future__ import annotations

import asyncio
from http import HTTPStatus

from fastapi import HTTPException, Request
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse

from vllm_omni_ext.config.schema import OmniConfig
from vllm_omni_ext.serving.body_scan import BodyLimits, BodyRefused, BodyScan
from vllm_omni_ext.serving.failures import printable

FORMS = ("multipart/", "application/x-www-form-urlencoded")
"""Content types of bodies other than JSON; a route may still parse such a body as JSON if it starts like JSON."""

LONGEST_WIDE_TEXT = 8 << 20
"""Bytes of a text outside base64: twice the text of the longest contexts."""

DRAIN_S = 1.0
"""Seconds to read from a refused client that is still sending, so that it can read the error response."""


class RefusedBody(HTTPException):
    """Status 413, as an exception type that FastAPI's body parsing does not catch."""

    def __init__(self, reason: BodyRefused) -> None:
        super().__init__(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, printable(str(reason)))
        self.parameter = printable(reason.parameter)


async def refused_handler(request: Request, error: RefusedBody) -> JSONResponse:
    """Return the error response, with the field's name."""
    status = HTTPStatus(error.status_code)
    info = ErrorInfo(message=error.detail, type=status.phrase, param=error.parameter, code=status.value)
    return JSONResponse(ErrorResponse(error=info).model_dump(), status)


def limits_of(config: OmniConfig) -> BodyLimits:
    """Return the limits of the configuration."""
    return BodyLimits(
        values=config.max_body_values,
        ids=config.max_body_ids,
        depth=config.max_body_depth,
        in_field=config.max_field_elements,
        field_values=config.max_field_values,
        field_bytes=config.max_field_bytes,
        wide_text_bytes=LONGEST_WIDE_TEXT,
    )


class BodyGate:
    """ASGI middleware that counts bodies as they arrive and refuses them as soon as they exceed a limit."""

    def __init__(self, app: ASGIApp, *, limits: BodyLimits) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scan: BodyScan | None = BodyScan(self._limits)
        undecided = Headers(scope=scope).get("content-type", "").lower().startswith(FORMS)

        async def counted() -> Message:
            nonlocal scan, undecided
            message = await receive()
            body = message.get("body", b"")
            if undecided and (begin := body.lstrip()[:1]):
                undecided = False
                if begin not in (b"{", b"["):
                    scan = None
            if scan is not None and body:
                try:
                    scan.feed(body)
                except BodyRefused as error:
                    scan = None
                    await _drain(receive, message)
                    raise RefusedBody(error) from error
            return message

        await self._app(scope, counted, send)


async def _drain(receive: Receive, message: Message) -> None:
    """Receive and drop the rest of the client's body."""
    try:
        async with asyncio.timeout(DRAIN_S):
            while message.get("more_body", False):
                message = await receive()
    except TimeoutError:
        return
