"""Errors that repeat what a client sent, made short: some of vLLM's name every wrong token id of a request."""

from __future__ import annotations

import json
from http import HTTPStatus

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_omni_ext.serving.failures import printable

LONGEST_ERROR = 16 << 10
"""Bytes of an answer with an error; of a longer one the message is cut."""


class ShortErrors:
    """ASGI middleware: no error is longer than `LONGEST_ERROR`."""

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
    """The same answer with a short message, parameter and name of the error's kind, if it is vLLM's error."""
    try:
        answer = json.loads(body)
    except ValueError:
        return body
    error = answer.get("error") if isinstance(answer, dict) else None
    if not isinstance(error, dict):
        return body
    answer["error"] = {name: printable(each) if isinstance(each, str) else each for name, each in error.items()}
    return json.dumps(answer).encode()
