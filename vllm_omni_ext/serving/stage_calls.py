"""vLLM's operator endpoints (`/sleep`, `/collective_rpc`, ...) with `targets`: stages and replicas by name.

Each is there when vLLM's server has it. Without `targets` vLLM's own handler answers.
"""

from __future__ import annotations

import json
import math
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.responses import Response
from vllm.entrypoints.serve.dev.cache import api_router as cache
from vllm.entrypoints.serve.dev.rpc import api_router as rpc
from vllm.entrypoints.serve.dev.sleep import api_router as sleeping
from vllm.entrypoints.serve.profile import api_router as profile
from vllm.v1.engine import PauseMode

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
    """Put ours in the place of those of vLLM that have the same path; what vLLM does not offer is left out."""
    stock = {_path(route) for route in app.router.routes}
    ours = {_path(route): route for each in (router, adapters.router) for route in each.routes if _path(route) in stock}
    app.router.routes[:] = [*ours.values(), *(route for route in app.router.routes if _path(route) not in ours)]


def _path(route: Any) -> str | None:
    return getattr(route, "path", None)


@router.post("/sleep")
@refusing
async def sleep(
    raw_request: Request,
    level: Annotated[int, Query(ge=0, le=2)] = 1,
    mode: Annotated[PauseMode, Query()] = "abort",
    targets: Targets = None,
) -> Response:
    """Put stages to sleep."""
    if targets is None:
        return await sleeping.sleep(raw_request, level, mode)
    return report(await omni_of(raw_request).sleep(level, mode, targets=targets))


@router.post("/wake_up")
@refusing
async def wake_up(raw_request: Request, tags: Targets = None, targets: Targets = None) -> Response:
    """Wake stages up."""
    if targets is None:
        return await sleeping.wake_up(raw_request)
    return report(await omni_of(raw_request).wake_up(tags, targets=targets))


@router.get("/is_sleeping")
@refusing
async def is_sleeping(raw_request: Request, targets: Targets = None) -> Response:
    """Whether stages sleep."""
    if targets is None:
        return await sleeping.is_sleeping(raw_request)
    return report(await omni_of(raw_request).is_sleeping(targets=targets))


@router.post("/release_kv_cache_memory")
@refusing
async def release_kv_cache_memory(raw_request: Request, targets: Targets = None) -> Response:
    """Give the memory of KV caches back."""
    if targets is None:
        return await sleeping.release_kv_cache_memory(raw_request)
    return report(await omni_of(raw_request).release_kv_cache_memory(targets=targets))


@router.post("/reset_prefix_cache")
@refusing
async def reset_prefix_cache(
    raw_request: Request,
    reset_running_requests: bool = False,
    reset_external: bool = False,
    targets: Targets = None,
) -> Response:
    """Forget cached prefixes."""
    if targets is None:
        return await cache.reset_prefix_cache(raw_request, reset_running_requests, reset_external)
    given = (reset_running_requests, reset_external)
    return report(await omni_of(raw_request).reset_prefix_cache(*given, targets=targets))


@router.post("/reset_mm_cache")
@refusing
async def reset_mm_cache(raw_request: Request, targets: Targets = None) -> Response:
    """Forget processed media."""
    if targets is None:
        return await cache.reset_mm_cache(raw_request)
    return report(await omni_of(raw_request).reset_mm_cache(targets=targets))


@router.post("/reset_encoder_cache")
@refusing
async def reset_encoder_cache(raw_request: Request, targets: Targets = None) -> Response:
    """Forget encoded media."""
    if targets is None:
        return await cache.reset_encoder_cache(raw_request)
    return report(await omni_of(raw_request).reset_encoder_cache(targets=targets))


@router.post("/start_profile")
@refusing
async def start_profile(
    raw_request: Request, profile_request: profile.StartProfileRequest | None = None, targets: Targets = None
) -> Response:
    """Start profilers."""
    if targets is None:
        return await profile.start_profile(raw_request, profile_request)
    given = profile_request.model_dump(exclude_none=True) if profile_request else {}
    return report(await omni_of(raw_request).start_profile(**given, targets=targets))


@router.post("/stop_profile")
@refusing
async def stop_profile(raw_request: Request, targets: Targets = None) -> Response:
    """Stop profilers."""
    if targets is None:
        return await profile.stop_profile(raw_request)
    return report(await omni_of(raw_request).stop_profile(targets=targets))


@router.post("/collective_rpc")
@refusing
async def collective_rpc(raw_request: Request, targets: Targets = None) -> Response:
    """Call a method of workers; `targets` may also be a key of the body."""
    body = _object(await raw_request.body())
    named = named_in(targets, body.get(TARGETS))
    if named is None or body.get("method") is None:  # vLLM says what is missing
        return await rpc.collective_rpc(raw_request)
    args, kwargs, timeout = body.get("args", []), body.get("kwargs", {}), body.get("timeout")
    for key, fits, wanted in (
        ("method", isinstance(body["method"], str), "a text"),
        ("args", isinstance(args, list), "a list"),
        ("kwargs", isinstance(kwargs, dict), "an object"),
        ("timeout", timeout is None or (isinstance(timeout, int | float) and 0 < timeout < math.inf), "seconds, > 0"),
    ):
        if not fits:
            raise RequestError(f"{key}: must be {wanted}", parameter=key)
    omni = omni_of(raw_request)
    return report(await omni.collective_rpc(body["method"], timeout, tuple(args), kwargs, targets=named))


def _object(body: bytes) -> dict[str, Any]:
    """A body as an object; what is none is empty here, and refused by vLLM.

    Raises:
        RequestError: vLLM would trip over it.
    """
    try:
        found = json.loads(body)
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not JSON: {error}", parameter="body") from error
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
