"""Validates request bodies: stops at the first error, answers it with status 400, refuses values that crash engines."""

from __future__ import annotations

import asyncio
import inspect
import math
import re
import traceback
from collections.abc import Awaitable, Callable, Iterator
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.dependencies.utils import get_flat_dependant
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, PydanticUserError, TypeAdapter
from pydantic_core import SchemaError, SchemaValidator
from starlette.responses import Response
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.exception_handling.handlers.exception import exception_handler
from vllm.exceptions import VLLMError, VLLMValidationError
from vllm.logger import init_logger

from vllm_omni_ext.errors import OmniError, RequestError
from vllm_omni_ext.observability.observer import Observer
from vllm_omni_ext.serving.options import LARGEST_INTEGER
from vllm_omni_ext.serving.responses import BadRequest, printable, refusal
from vllm_omni_ext.wire.stage_input import RESERVED

logger = init_logger(__name__)

VLLM_CHECK_CRASHES = (AttributeError, KeyError, IndexError)
"""Errors of vLLM's checks at JSON values of an unexpected type; vLLM answers them with status 500."""

CLIENT_ERRORS = (RequestValidationError, TypeError, ValueError, OverflowError, VLLMError, VLLMValidationError)
"""Errors of vLLM's checks that vLLM answers with status 400."""

READING = "request_body_to_args"
"""FastAPI's function that converts a body to a request. Errors raised inside it are caused by the client's body."""

CONVERSATION = frozenset({"messages", "tools"})
"""Fields whose values are not sent to an engine: they are rendered to a prompt."""

EXTRA_ARGS = "vllm_xargs"

CONTAINERS = frozenset({"list", "tuple", "set", "frozenset", "dict"})
"""Types of pydantic's core schemas that support `fail_fast`."""

OPAQUE = frozenset({"metadata", "serialization", "default", "expected", "config", "cls"})
"""Keys of a core schema whose values are not schemas."""

HALF_CHARACTER = re.compile("[\ud800-\udfff]")


def install(app: FastAPI, observer: Observer) -> None:
    """Make all routes of `app` validate bodies as this module describes, and count refused requests in the metrics."""
    stock: dict[type[Exception], Any] = {kind: app.exception_handlers[kind] for kind in CLIENT_ERRORS}
    for kind, handler in (stock | dict.fromkeys(VLLM_CHECK_CRASHES, _malformed_body)).items():
        app.add_exception_handler(kind, _counting(handler, observer))
    for route in app.routes:
        if isinstance(route, APIRoute):
            _stop_at_first_error(route)


def _counting(
    handler: Callable[[Request, Any], Awaitable[Response]], observer: Observer
) -> Callable[[Request, Any], Awaitable[Response]]:
    async def counted(request: Request, error: Exception) -> Response:
        answer = await handler(request, error)
        count_refusal(observer, answer.status_code, error)
        return answer

    return counted


def count_refusal(observer: Observer, status: int, error: Exception | None = None) -> None:
    """Count an answer of vLLM in the metrics if it refuses the request, unless the orchestrator has counted its error.

    Args:
        error: the error that became the answer; None: there was no exception.
    """
    if status == HTTPStatus.BAD_REQUEST and not _was_counted(error):
        parameter = getattr(error, "parameter", None) or "body"
        observer.refused(RequestError("the request is not valid", parameter=parameter))


def client_has_left() -> bool:
    """Return whether the client of the current request has disconnected. vLLM then answers with an error response."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _was_counted(error: BaseException | None) -> bool:
    """Return whether the orchestrator has counted the error that was converted to `error`, as one of a stage.

    It counts the failures of requests that have begun, and adds a note to each.
    """
    while error is not None and not (isinstance(error, OmniError) and hasattr(error, "__notes__")):
        error = error.__cause__
    return error is not None


def _while_reading(error: Exception) -> bool:
    return any(frame.name == READING for frame in traceback.extract_tb(error.__traceback__))


async def _malformed_body(request: Request, error: Exception) -> Response:
    """Return status 400 if `error` was raised while FastAPI read the body; else return vLLM's response."""
    if not _while_reading(error):
        answer: Response = await exception_handler(request, error)
        return answer
    message = f"the request's body has a value of the wrong type: {printable(str(error))}"
    return refusal(create_error_response(BadRequest(message, parameter="body")))


def _stop_at_first_error(route: APIRoute) -> None:
    """Rebuild the route's validators with pydantic's `fail_fast`. The results for valid bodies do not change.

    Without it, pydantic checks all elements of a list and creates an error for each allowed type of each element:
    10,000 empty objects in `messages` give 150,000 errors, and in `input` of `/v1/responses` 2,000,000 errors.
    """
    fields = [field._type_adapter for field in get_flat_dependant(route.dependant).body_params]
    for adapter in [*fields, *_adapters_in(route.endpoint, set())]:
        try:
            adapter.rebuild()
            adapter.validator = SchemaValidator(_failing_fast(adapter.core_schema), _use_prebuilt=False)
        except (PydanticUserError, SchemaError):  # a type of another package is not complete
            logger.warning("Bodies of %s are validated to the end: their type is not complete", route.path)


def _adapters_in(value: Any, seen: set[int]) -> Iterator[TypeAdapter[Any]]:
    """Yield the TypeAdapters in a function's closure (as of `/invocations`), also inside lists and nested functions."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, TypeAdapter):
        yield value
    inside = value if isinstance(value, list | tuple) else ()
    if inspect.isfunction(value):
        inside = tuple(inspect.getclosurevars(value).nonlocals.values())
    for each in inside:
        yield from _adapters_in(each, seen)


def _failing_fast(schema: Any) -> Any:
    """Return a copy of a pydantic core schema with `fail_fast` for all containers."""
    if isinstance(schema, list | tuple):
        return type(schema)(_failing_fast(each) for each in schema)
    if not isinstance(schema, dict):
        return schema
    kind = schema.get("type")
    if not isinstance(kind, str):  # a mapping of names to fields or choices
        return {name: _failing_fast(each) for name, each in schema.items()}
    copy = {key: each if key in OPAQUE else _failing_fast(each) for key, each in schema.items()}
    return copy | {"fail_fast": True} if kind in CONTAINERS else copy


def validate_json_values(request: BaseModel) -> None:
    """Refuse values that crash engines: NaN, infinity, integers beyond 64 bits, halves of surrogate pairs.

    `messages` and `tools` are not checked.

    Raises:
        RequestError: a value is invalid, or a key of `vllm_xargs` is reserved; the error names the field.
    """
    fields = {name: getattr(request, name) for name in request.model_fields_set if name not in CONVERSATION}
    for name, value in fields.items():
        if (found := _problem(value)) is not None:
            path = name + found[0]
            raise RequestError(f"{path}: {found[1]}", parameter=path)
    for key in fields.get(EXTRA_ARGS) or ():
        if key in RESERVED:
            raise RequestError(f"{EXTRA_ARGS}.{key}: is reserved", parameter=f"{EXTRA_ARGS}.{key}")


def _problem(value: Any) -> tuple[str, str] | None:
    """Return (path, error text) of the first value inside `value` that is refused, or None.

    Refused are integers of more than 64 bits, floats that are not finite, and text with half of a surrogate pair. The
    recursion has at most 100 levels, because `BodyScan` has refused bodies with more levels of nesting.
    """
    if isinstance(value, int):
        return ("", "must be an integer of at most 64 bits") if abs(value) > LARGEST_INTEGER else None
    if isinstance(value, float):
        return None if math.isfinite(value) else ("", f"must be a finite number, got {value}")
    if isinstance(value, str):
        return ("", "must be text; it has half of a surrogate pair in it") if HALF_CHARACTER.search(value) else None
    if isinstance(value, list | tuple):
        for index, each in enumerate(value):
            if (found := _problem(each)) is not None:
                return f"[{index}]{found[0]}", found[1]
    if isinstance(value, BaseModel):
        value = dict(value)
    if isinstance(value, dict):
        for key, each in value.items():
            if (found := _problem(key)) is not None:
                return found
            if (found := _problem(each)) is not None:
                return f".{key}{found[0]}", found[1]
    return None
