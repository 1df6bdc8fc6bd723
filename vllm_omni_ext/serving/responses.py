"""Errors and server-sent events as OpenAI's API has them: ours become vLLM's errors, which have a status and JSON."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from http import HTTPStatus
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import GenerationError, RetryableRequestError, VLLMError, VLLMValidationError

from vllm_omni_ext.errors import OmniError, RequestError, StageUnavailable, UnknownMember

LONGEST_MESSAGE = 1000
"""Length limit of an error message or a parameter's name, in characters."""

EVENT_STREAM = "text/event-stream"
PREFIX, END = "data: ", "\n\n"
DONE = f"{PREFIX}[DONE]{END}"

ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    status.value: {"model": ErrorResponse}
    for status in (
        HTTPStatus.BAD_REQUEST,
        HTTPStatus.NOT_FOUND,
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        HTTPStatus.INTERNAL_SERVER_ERROR,
        HTTPStatus.SERVICE_UNAVAILABLE,
    )
}
"""Errors that the ready-made APIs answer with, as a route's `responses`."""


class BadRequest(VLLMValidationError):
    """HTTP 400. Its text is the plain message, which contains the field name already."""

    def __str__(self) -> str:
        return str(self.args[0])


def as_vllm_error(error: OmniError) -> VLLMError:
    """RequestError -> 400 with `param`, StageUnavailable -> 503, everything else -> 500."""
    if isinstance(error, RequestError):
        return BadRequest(printable(str(error)), parameter=printable(error.parameter))
    if isinstance(error, StageUnavailable):
        return RetryableRequestError(str(error))
    return GenerationError(str(error))


async def omni_error_handler(request: Request, error: OmniError) -> JSONResponse:
    """Answer an error that a route has raised; a RequestError, which refuses a request, is counted."""
    if isinstance(error, RequestError):
        request.app.state.engine_client.observer.refused(error)
    if isinstance(error, UnknownMember):
        return refusal(create_error_response(printable(str(error)), "NotFoundError", HTTPStatus.NOT_FOUND, "targets"))
    return refusal(create_error_response(as_vllm_error(error)))


def refusal(error: ErrorResponse) -> JSONResponse:
    """Return an error as vLLM's routes answer it."""
    return JSONResponse(error.model_dump(), status_code=error.error.code)


def printable(text: str) -> str:
    """Return a text that may repeat client input, cut to a limit and safe to encode."""
    short = text if len(text) <= LONGEST_MESSAGE else text[:LONGEST_MESSAGE] + "..."
    return short.encode("utf-8", "backslashreplace").decode("utf-8")


async def with_vllm_errors(source: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    """Yield the items of `source`; its errors become vLLM's errors, also if vLLM has wrapped them. Closes `source`."""
    async with aclosing(source):
        try:
            async for item in source:
                yield item
        except OmniError as err:
            raise as_vllm_error(err) from err
        except VLLMError as err:
            if isinstance(err.__cause__, OmniError):
                raise as_vllm_error(err.__cause__) from err
            raise


def read_event(event: str) -> dict[str, Any]:
    """Return the object of an event other than `DONE`."""
    found: dict[str, Any] = json.loads(event[len(PREFIX) :])
    return found


def write_event(data: dict[str, Any]) -> str:
    """Return an event without a name."""
    return f"{PREFIX}{json.dumps(data, ensure_ascii=False, separators=(',', ':'))}{END}"


def named_event(kind: str, **fields: Any) -> str:
    """Return an event with its kind both as name and as `type`, as OpenAI's do."""
    return f"event: {kind}\n{write_event({'type': kind, **fields})}"
