"""Bodies that are refused before the handler of their route is called: they are counted, and none is an error 500.

Some of vLLM's checks crash because they expect an object where a client may send any JSON.
"""

from __future__ import annotations

import traceback
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.responses import JSONResponse, Response
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.exception_handling.handlers.exception import exception_handler
from vllm.exceptions import VLLMError, VLLMValidationError

from vllm_omni_ext.errors import RequestError
from vllm_omni_ext.observability.observer import Observer
from vllm_omni_ext.serving.failures import BadRequest, printable

TRIPPED = (AttributeError, KeyError, IndexError)
"""Errors that such a check raises, and that vLLM would answer with status 500."""

OF_CLIENTS = (TypeError, ValueError, OverflowError, VLLMError, VLLMValidationError)
"""Errors that such a check raises, and that vLLM answers with status 400."""

READING = "request_body_to_args"
"""FastAPI's function that turns a body into a request; all functions that it calls work on client input."""

Handler = Callable[[Request, Any], Awaitable[Response]]


def install(app: FastAPI, observer: Observer) -> None:
    """Answer such bodies with status 400, on every route of `app`, and count them."""
    kinds = (RequestValidationError, *OF_CLIENTS)
    stock: dict[type[Exception], Any] = {kind: app.exception_handlers[kind] for kind in kinds}
    for kind, handler in (stock | dict.fromkeys(TRIPPED, _malformed_body)).items():
        app.add_exception_handler(kind, _counting(handler, observer))


def _counting(handler: Handler, observer: Observer) -> Handler:
    async def counted(request: Request, error: Exception) -> Response:
        if isinstance(error, RequestValidationError) or _while_reading(error):
            observer.refused(RequestError("the request's body is not valid", parameter="body"))
        return await handler(request, error)

    return counted


def _while_reading(error: Exception) -> bool:
    return any(frame.name == READING for frame in traceback.extract_tb(error.__traceback__))


async def _malformed_body(request: Request, error: Exception) -> Response:
    """Return status 400 if `error` was raised while a body was read; otherwise answer as vLLM does."""
    if not _while_reading(error):
        answer: Response = await exception_handler(request, error)
        return answer
    refusal = BadRequest(f"the request's body has a value of the wrong type: {printable(str(error))}", parameter="body")
    return JSONResponse(create_error_response(refusal).model_dump(), status_code=HTTPStatus.BAD_REQUEST)
