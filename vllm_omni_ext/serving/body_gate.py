"""What every request's body passes before a route reads it: the limits of `BodyScan`."""

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
"""Content types of bodies that are no JSON; a route may read JSON from them all the same if they begin like it."""

LONGEST_WIDE_TEXT = 8 << 20
"""Bytes of a text that is no base64. Twice what the longest contexts take."""

DRAIN_S = 1.0
"""A client that still sends is listened to for so long, so that it sees why its request is refused."""


class RefusedBody(HTTPException):
    """Status 413, as an exception that FastAPI lets through from where it reads a body."""

    def __init__(self, reason: BodyRefused) -> None:
        super().__init__(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, printable(str(reason)))
        self.parameter = printable(reason.parameter)


async def refused_handler(request: Request, error: RefusedBody) -> JSONResponse:
    """The answer: what is wrong, with the field's name."""
    status = HTTPStatus(error.status_code)
    said = ErrorInfo(message=error.detail, type=status.phrase, param=error.parameter, code=status.value)
    return JSONResponse(ErrorResponse(error=said).model_dump(), status)


def limits_of(config: OmniConfig) -> BodyLimits:
    """The limits that the configuration gives."""
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
    """ASGI middleware: bodies are counted as they arrive, and refused as soon as there is too much in them."""

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
    """Take what the client still sends, and drop it."""
    try:
        async with asyncio.timeout(DRAIN_S):
            while message.get("more_body", False):
                message = await receive()
    except TimeoutError:
        return
