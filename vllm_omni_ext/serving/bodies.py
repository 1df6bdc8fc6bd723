"""Handles request bodies that crash vLLM's checks: some checks expect an object where a client may send any JSON."""

from __future__ import annotations

import traceback
from http import HTTPStatus

from fastapi import Request
from starlette.responses import JSONResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.exception_handling.handlers.exception import exception_handler

from vllm_omni_ext.serving.failures import BadRequest, printable

TRIPPED = (AttributeError, KeyError, IndexError)
"""Errors that such a check raises."""

READING = "request_body_to_args"
"""FastAPI's function that turns a body into a request; all functions that it calls work on client input."""


async def malformed_body_handler(request: Request, error: Exception) -> JSONResponse:
    """Return status 400 if `error` was raised while a body was read; otherwise answer as vLLM does."""
    if all(frame.name != READING for frame in traceback.extract_tb(error.__traceback__)):
        return await exception_handler(request, error)
    refusal = BadRequest(f"the request's body has a value of the wrong type: {printable(str(error))}", parameter="body")
    return JSONResponse(create_error_response(refusal).model_dump(), status_code=HTTPStatus.BAD_REQUEST)
