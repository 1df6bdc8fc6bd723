"""Validation that stops at the first wrong element of a list or an object.

Pydantic checks all elements, and creates one error for each element and each of its possible types: 10,000 empty
objects as messages give 150,000 errors, 10,000 as `input` of `/v1/responses` two million. The validators of this
server's routes are rebuilt from vLLM's schemas with pydantic's `fail_fast`; valid bodies give the same results as
before.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI
from fastapi.dependencies.utils import get_flat_dependant
from fastapi.routing import APIRoute
from pydantic import PydanticUserError, TypeAdapter
from pydantic_core import SchemaError, SchemaValidator
from vllm.logger import init_logger

logger = init_logger(__name__)

CONTAINERS = frozenset({"list", "tuple", "set", "frozenset", "dict"})
"""Schema types that support `fail_fast`."""

OPAQUE = frozenset({"metadata", "serialization", "default", "expected", "config", "cls"})
"""Keys of a schema whose values are not schemas."""


def stop_at_first_error(app: FastAPI) -> None:
    """Make the routes of `app` validate bodies this way. Only `app` changes."""
    for route in app.routes:
        if isinstance(route, APIRoute):
            _stop_at_first_error(route)


def _stop_at_first_error(route: APIRoute) -> None:
    for adapter in _adapters(route):
        try:
            adapter.rebuild()
            adapter.validator = SchemaValidator(_failing_fast(adapter.core_schema), _use_prebuilt=False)
        except (PydanticUserError, SchemaError):  # a type of another package, which its route may never validate
            logger.warning("Bodies of %s are validated to the end: their type is not complete", route.path)


def _adapters(route: APIRoute) -> Iterator[TypeAdapter[Any]]:
    """Yield the validators of the route's body: FastAPI's, and those inside the route's function (`/invocations`)."""
    for field in get_flat_dependant(route.dependant).body_params:
        yield field._type_adapter
    yield from _kept_by(route.endpoint, set())


def _kept_by(value: Any, seen: set[int]) -> Iterator[TypeAdapter[Any]]:
    """Yield the adapters in a function's closure, also inside lists and other functions."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, TypeAdapter):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _kept_by(each, seen)
    else:
        for kept in inspect.getclosurevars(value).nonlocals.values() if inspect.isfunction(value) else ():
            yield from _kept_by(kept, seen)


def _failing_fast(schema: Any) -> Any:
    """Return a copy of a core schema in which all lists and objects fail fast."""
    if isinstance(schema, list | tuple):
        return type(schema)(_failing_fast(each) for each in schema)
    if not isinstance(schema, dict):
        return schema
    kind = schema.get("type")
    if not isinstance(kind, str):  # a mapping of names to fields or choices
        return {name: _failing_fast(each) for name, each in schema.items()}
    copy = {key: each if key in OPAQUE else _failing_fast(each) for key, each in schema.items()}
    return copy | {"fail_fast": True} if kind in CONTAINERS else copy
