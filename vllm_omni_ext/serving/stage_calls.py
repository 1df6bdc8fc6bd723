"""vLLM's operator endpoints (`/sleep`, `/collective_rpc`, ...) with `targets`: stages and replicas by name.

Each endpoint exists when vLLM's server has it. Without `targets`, vLLM's own handler answers.
"""

from __future__ import annotations

import inspect
import json
import math
from functools import wraps
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import Response
from vllm.entrypoints.serve.dev.cache import api_router as cache
from vllm.entrypoints.serve.dev.rpc import api_router as rpc
from vllm.entrypoints.serve.dev.sleep import api_router as sleeping
from vllm.entrypoints.serve.profile import api_router as profile

from vllm_omni_ext.errors import RequestError
from vllm_omni_ext.serving import adapters
from vllm_omni_ext.serving.call_reports import TARGETS, Targets, named_in, omni_of, refusing, report
from vllm_omni_ext.serving.parameters import KnownParameters

BODIES = {
    "/collective_rpc": ("method", "args", "kwargs", "timeout", TARGETS),
    "/start_profile": tuple(profile.StartProfileRequest.model_fields),
}

router = APIRouter(dependencies=[Depends(KnownParameters(BODIES))])


def add_routes(app: FastAPI) -> None:
    """Replace vLLM's routes of the same paths with ours; endpoints that vLLM does not offer are left out."""
    stock = {_path(route) for route in app.router.routes}
    own = {_path(route): route for each in (router, adapters.router) for route in each.routes if _path(route) in stock}
    app.router.routes[:] = [*own.values(), *(route for route in app.router.routes if _path(route) not in own)]


def _path(route: Any) -> str | None:
    return getattr(route, "path", None)


def _add_route(stock: Any) -> None:
    """Serve a route of vLLM with `targets` in addition to its own parameters."""
    handler, name = stock.endpoint, stock.name
    own = [_parameter(TARGETS), *([_parameter("tags")] if name == "wake_up" else [])]  # vLLM reads `tags` itself
    stock_parameters = list(inspect.signature(handler, eval_str=True).parameters.values())[1:]

    @wraps(handler)
    async def answer(raw_request: Request, targets: list[str] | None, **arguments: Any) -> Any:
        if targets is None:
            return await handler(raw_request, **{each.name: arguments[each.name] for each in stock_parameters})
        body = arguments.pop("profile_request", None)
        keywords = body.model_dump(exclude_none=True) if body else {}
        return report(await getattr(omni_of(raw_request), name)(*arguments.values(), **keywords, targets=targets))

    request = inspect.Parameter("raw_request", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Request)
    answer.__signature__ = inspect.Signature([request, *stock_parameters, *own], return_annotation=Response)  # type: ignore[attr-defined]
    router.add_api_route(stock.path, refusing(answer), methods=list(stock.methods))


def _parameter(name: str) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Targets)


for _route in (*sleeping.router.routes, *cache.router.routes, *profile.router.routes):
    _add_route(_route)


@router.post("/collective_rpc")
@refusing
async def collective_rpc(raw_request: Request, targets: Targets = None) -> Response:
    """Call a method of workers; `targets` may also be a key of the body."""
    body = _object(await raw_request.body())
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
            raise RequestError(f"{key}: must be {expected}", parameter=key)
    omni = omni_of(raw_request)
    return report(await omni.collective_rpc(body["method"], timeout, tuple(args), kwargs, targets=named))


def _object(body: bytes) -> dict[str, Any]:
    """Return a body as an object; any other JSON becomes an empty object, which vLLM refuses.

    Raises:
        RequestError: vLLM's handler would crash on the body.
    """
    try:
        found = json.loads(body)
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not JSON: {error}", parameter="body") from error
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
