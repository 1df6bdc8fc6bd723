"""Shortens errors that repeat the client's input: some of vLLM's name every wrong token id of a request."""

from __future__ import annotations

import json
from http import HTTPStatus

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_omni_ext.serving.failures import printable

LONGEST_ERROR = 16 << 10
"""Largest error response in bytes; the message of a longer one is cut."""


class ShortErrors:
    """ASGI middleware that limits every error to `LONGEST_ERROR` bytes."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        start: Message | None = None
        body = b""

        async def shortened(message: Message) -> None:
            nonlocal start, body
            if message["type"] == "http.response.start" and _is_long_error(message):
                start = message
            elif start is None:
                await send(message)
            else:
                body += message.get("body", b"")
                if not message.get("more_body", False):
                    short = shorten(body)
                    MutableHeaders(scope=start)["content-length"] = str(len(short))
                    await send(start)
                    await send({"type": "http.response.body", "body": short})

        await self._app(scope, receive, shortened)


def _is_long_error(start: Message) -> bool:
    headers = Headers(raw=start["headers"])
    return (
        start["status"] >= HTTPStatus.BAD_REQUEST
        and headers.get("content-type", "").startswith("application/json")
        and int(headers.get("content-length", "0")) > LONGEST_ERROR
    )


def shorten(body: bytes) -> bytes:
    """Return the response with message, parameter and error type cut to a limit, if it is an error of vLLM's format."""
    try:
        answer = json.loads(body)
    except ValueError:
        return body
    error = answer.get("error") if isinstance(answer, dict) else None
    if not isinstance(error, dict):
        return body
    answer["error"] = {name: printable(each) if isinstance(each, str) else each for name, each in error.items()}
    return json.dumps(answer).encode()
