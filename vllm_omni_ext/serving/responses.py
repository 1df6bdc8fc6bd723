"""Converts errors of this package (`OmniError`) to vLLM's, which have an HTTP status; writes server-sent events."""

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
"""Error statuses of `DirectServing`'s APIs, for FastAPI's argument `responses`."""


class BadRequest(VLLMValidationError):
    """vLLM's error with HTTP status 400. `str()` returns only the message, which contains the field's name already."""

    def __str__(self) -> str:
        return str(self.args[0])


def as_vllm_error(error: OmniError) -> VLLMError:
    """Convert an error of this package to vLLM's: RequestError to status 400, StageUnavailable to 503, other to 500."""
    if isinstance(error, RequestError):
        return BadRequest(printable(str(error)), parameter=printable(error.parameter))
    if isinstance(error, StageUnavailable):
        return RetryableRequestError(str(error))
    return GenerationError(str(error))


async def omni_error_handler(request: Request, error: OmniError) -> JSONResponse:
    """Return the response to an error that a route has raised; the metrics count a RequestError as refused request."""
    if isinstance(error, RequestError):
        request.app.state.engine_client.observer.refused(error)
    if isinstance(error, UnknownMember):
        return refusal(create_error_response(printable(str(error)), "NotFoundError", HTTPStatus.NOT_FOUND, "targets"))
    return refusal(create_error_response(as_vllm_error(error)))


def refusal(error: ErrorResponse) -> JSONResponse:
    """Return the HTTP response with vLLM's JSON object for an error."""
    return JSONResponse(error.model_dump(), status_code=error.error.code)


def printable(text: str) -> str:
    """Return a text that may contain client input, truncated to LONGEST_MESSAGE, with surrogates escaped."""
    short = text if len(text) <= LONGEST_MESSAGE else text[:LONGEST_MESSAGE] + "..."
    return short.encode("utf-8", "backslashreplace").decode("utf-8")


async def with_vllm_errors(source: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    """Yield the items of `source`; convert an `OmniError`, also if vLLM has wrapped it, to vLLM's. Closes `source`."""
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
    """Return the JSON object of a server-sent event; the event must not be `DONE`."""
    found: dict[str, Any] = json.loads(event[len(PREFIX) :])
    return found


def write_event(data: dict[str, Any]) -> str:
    """Return a server-sent event with `data` as JSON, and without a name."""
    return f"{PREFIX}{json.dumps(data, ensure_ascii=False, separators=(',', ':'))}{END}"


def named_event(kind: str, **fields: Any) -> str:
    """Return a server-sent event that has `kind` as its name and as its `type`, as OpenAI's events do."""
    return f"event: {kind}\n{write_event({'type': kind, **fields})}"
