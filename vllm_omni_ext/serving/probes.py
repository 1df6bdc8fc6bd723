"""`/health/live`, `/health/ready` and `/health/startup`: the probes of Kubernetes.

A missing replica fails readiness only, because its supervisor starts it again. Liveness fails if only a restart of the
server helps: a stage that requests need was given up (`restart_limit`), or the coordinator has been silent for too
long. The head does not end by itself then: other stages still answer, and the operator can read `/v1/omni/status`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from http import HTTPStatus

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse

from vllm_omni_ext.omni import AsyncOmni
from vllm_omni_ext.serving.status import has_enough, kinds_of, lacking, needed_stages

LIVE, READY, STARTED = "/health/live", "/health/ready", "/health/startup"

COORDINATOR_LOST_S = 300.0
"""Silence of the coordinator after which only a restart of the server helps; the head replaces one within seconds."""

_METHODS = ["GET", "HEAD"]

router = APIRouter()


class Progress:
    """The state between probes: this server's start time, and the stages that have been up.

    Args:
        clock: seconds that never go back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = clock()
        self._seen: set[str] = set()

    def silence(self, omni: AsyncOmni) -> float:
        """Return the seconds since the coordinator's last view, at most those since the start."""
        watcher, running = omni.replica_connections.watcher, self._clock() - self._since
        return 0.0 if watcher is None else min(watcher.age(), running)

    def never_up(self, omni: AsyncOmni) -> list[str]:
        """Return the needed stages that had their `min_replicas` neither at an earlier probe nor now."""
        needed = needed_stages(omni)
        self._seen.update(name for name in needed if has_enough(omni, name))
        return [name for name in needed if name not in self._seen]


def add_routes(app: FastAPI) -> None:
    """Add the three routes and their state."""
    app.state.progress = Progress()
    app.include_router(router)


@router.api_route(LIVE, methods=_METHODS, include_in_schema=False)
async def live(request: Request) -> JSONResponse:
    """Status 200 unless only a restart of the server helps; a replica that is started again is no reason."""
    omni: AsyncOmni = request.app.state.engine_client
    if omni.draining:
        return _answer([])
    silence = request.app.state.progress.silence(omni)
    reasons = ["the engine client has failed"] if omni.errored else []
    if silence > COORDINATOR_LOST_S:
        reasons.append(f"the coordinator has been silent for {silence:.0f} s")
    if (stage := omni.orchestrator.unavailable(needed_stages(omni))) is not None:
        reasons.append(f"stage '{stage}' has no replica, and none is started again (restart_limit)")
    return _answer(reasons)


@router.api_route(READY, methods=_METHODS, include_in_schema=False)
async def ready(request: Request, kind: str | None = None) -> JSONResponse:
    """Status 200 while every stage that requests need has its `min_replicas`; with `kind`, those of that kind."""
    omni: AsyncOmni = request.app.state.engine_client
    kinds_of(omni, kind)
    request.app.state.progress.never_up(omni)
    if omni.draining:
        return _answer(["the server is shutting down"])
    if omni.errored:
        return _answer(["the engine client has failed"])
    return _answer(lacking(omni, kind))


@router.api_route(STARTED, methods=_METHODS, include_in_schema=False)
async def started(request: Request) -> JSONResponse:
    """Status 200 once every stage that requests need has had its `min_replicas`, even if it has fewer now."""
    omni: AsyncOmni = request.app.state.engine_client
    missing = request.app.state.progress.never_up(omni)
    return _answer([f"stage '{name}' has not been up yet" for name in missing])


def _answer(reasons: list[str]) -> JSONResponse:
    if not reasons:
        return JSONResponse({"status": "ok"})
    return JSONResponse({"status": "failed", "reason": "; ".join(reasons)}, HTTPStatus.SERVICE_UNAVAILABLE)
