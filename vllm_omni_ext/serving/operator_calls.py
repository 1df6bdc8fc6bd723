"""Adds `targets` (names of stages and ids of replicas) to vLLM's operator endpoints (`/sleep`, `/collective_rpc`, ...).

An endpoint is added only if vLLM's server has it. Without `targets`, vLLM's own handler is called. Unknown parameters
are refused: with a misspelt `targets`, the call would otherwise be sent to every replica.
"""

from __future__ import annotations

import difflib
import inspect
import json
import math
from collections.abc import Collection
from functools import wraps
from http import HTTPStatus
from typing import Annotated, Any, TypeAlias

from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.responses import Response
from vllm.entrypoints.serve.dev.cache import api_router as cache
from vllm.entrypoints.serve.dev.rpc import api_router as rpc
from vllm.entrypoints.serve.dev.sleep import api_router as sleeping
from vllm.entrypoints.serve.profile import api_router as profile

from vllm_omni_ext.runtime.client.calls import Replies, failed
from vllm_omni_ext.serving.responses import BadRequest, printable

BODY = "body"
TARGETS = "targets"
"""Query parameter, or key of a JSON body, with stage names and replica ids."""

Targets: TypeAlias = Annotated[list[str] | None, Query()]


def known_parameters(*fields: str) -> Any:
    """Return a FastAPI dependency that raises BadRequest for unknown parameters. The error lists the allowed ones.

    Args:
        fields: allowed fields of the body; if empty, the route takes no body.
    """

    async def check(request: Request) -> None:
        allowed = [field.alias for field in request.scope["route"].dependant.query_params]
        _check("query parameters", request.query_params, allowed)
        body = _parsed(await request.body())
        if isinstance(body, dict):
            _check("fields of the body", body, fields)
        elif body is not None and not fields:
            raise BadRequest(f"{BODY}: is not read here; {_names_text('query parameters', allowed)}", parameter=BODY)

    return Depends(check)


def _check(kind: str, names: Collection[str], allowed: Collection[str]) -> None:
    for name in names:
        if name not in allowed:
            close = difflib.get_close_matches(name, allowed, n=1)
            advice = f"did you mean '{close[0]}'? " if close else ""
            shown = printable(name)
            raise BadRequest(f"{shown}: is unknown; {advice}{_names_text(kind, allowed)}", parameter=shown)


def _names_text(kind: str, allowed: Collection[str]) -> str:
    return f"{kind}: {', '.join(sorted(set(allowed))) or 'none'}"


def _parsed(body: bytes) -> Any:
    """Return the parsed JSON body; None if the body is empty, and its bytes if it is not JSON."""
    if not body.strip():
        return None
    try:
        return json.loads(body)
    except ValueError:
        return body


def named_in(query: list[str] | None, body: Any) -> list[str] | None:
    """Return the targets of a call from its query or its body; None if neither contains targets.

    Args:
        query: targets in the query.
        body: value of `targets` in the body; a single name may be a text.

    Raises:
        BadRequest: both contain targets, or the targets are not a list of texts.
    """
    if body is None:
        return query
    if query is not None:
        raise BadRequest("targets: give them in the query or in the body", parameter=TARGETS)
    if isinstance(body, str):
        return [body]
    if not isinstance(body, list) or not all(isinstance(each, str) for each in body):
        raise BadRequest("targets: must be a list of stage names and replica ids", parameter=TARGETS)
    return body


def report(replies: Replies) -> Response:
    """Return a response with the reply of each replica: {"replicas": {id: {"value": ...} or {"error": message}}}.

    The status is 500 if the call has failed on a replica, else 200.
    """
    replicas = {
        str(replica): {"value": reply.value}
        if reply.error is None
        else {"error": str(reply.error) or type(reply.error).__name__}
        for replica, reply in replies.items()
    }
    status = HTTPStatus.INTERNAL_SERVER_ERROR if failed(replies) else HTTPStatus.OK
    return Response(json.dumps({"replicas": replicas}, default=_plain), status, media_type="application/json")


def _plain(value: Any) -> Any:
    """Convert a value that JSON does not support: sets to lists, others to text, as in vLLM's `/collective_rpc`."""
    return sorted(value) if isinstance(value, set | frozenset) else str(value)


router = APIRouter()


def add_routes(app: FastAPI, adapters: APIRouter) -> None:
    """Replace vLLM's routes by the routes of `router` and `adapters` with the same path; no other routes are added."""
    stock = {getattr(route, "path", None) for route in app.router.routes}
    own: dict[Any, Any] = {route.path: route for route in (*router.routes, *adapters.routes) if route.path in stock}  # type: ignore[attr-defined]
    app.router.routes[:] = [
        *own.values(),
        *(route for route in app.router.routes if getattr(route, "path", None) not in own),
    ]


def _add_route(stock: Any) -> None:
    """Add a route to `router` with the path and parameters of vLLM's route `stock`, and with `targets`."""
    handler, name = stock.endpoint, stock.name
    names = (TARGETS, "tags") if name == "wake_up" else (TARGETS,)  # vLLM reads `tags` itself
    own = [inspect.Parameter(each, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Targets) for each in names]
    stock_parameters = list(inspect.signature(handler, eval_str=True).parameters.values())[1:]

    @wraps(handler)
    async def answer(raw_request: Request, targets: list[str] | None, **arguments: Any) -> Any:
        if targets is None:
            return await handler(raw_request, **{each.name: arguments[each.name] for each in stock_parameters})
        body = arguments.pop("profile_request", None)
        keywords = body.model_dump(exclude_none=True) if body else {}
        call = getattr(raw_request.app.state.engine_client, name)
        return report(await call(*arguments.values(), **keywords, targets=targets))

    request = inspect.Parameter("raw_request", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Request)
    answer.__signature__ = inspect.Signature([request, *stock_parameters, *own], return_annotation=Response)  # type: ignore[attr-defined]
    fields = profile.StartProfileRequest.model_fields if name == "start_profile" else ()
    router.add_api_route(stock.path, answer, methods=list(stock.methods), dependencies=[known_parameters(*fields)])


for _route in (*sleeping.router.routes, *cache.router.routes, *profile.router.routes):
    _add_route(_route)


@router.post("/collective_rpc", dependencies=[known_parameters("method", "args", "kwargs", "timeout", TARGETS)])
async def collective_rpc(raw_request: Request, targets: Targets = None) -> Response:
    """Call a method of the workers of the targets; `targets` may also be a key of the body."""
    parsed = _parsed(await raw_request.body())
    body = parsed if isinstance(parsed, dict) else {}  # vLLM's handler, called below, refuses other bodies
    named = named_in(targets, body.get(TARGETS))
    if named is None or body.get("method") is None:  # vLLM's handler reports the missing key
        return await rpc.collective_rpc(raw_request)
    args, kwargs, timeout = body.get("args", []), body.get("kwargs", {}), body.get("timeout")
    for key, fits, expected in (
        ("method", isinstance(body["method"], str), "a text"),
        ("args", isinstance(args, list), "a list"),
        ("kwargs", isinstance(kwargs, dict), "an object"),
        ("timeout", timeout is None or (isinstance(timeout, int | float) and 0 < timeout < math.inf), "seconds, > 0"),
    ):
        if not fits:
            raise BadRequest(f"{key}: must be {expected}", parameter=key)
    omni = raw_request.app.state.engine_client
    return report(await omni.collective_rpc(body["method"], timeout, tuple(args), kwargs, targets=named))
