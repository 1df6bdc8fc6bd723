"""`/health`, the probes of Kubernetes, `/metrics` and `/v1/omni/status`.

A missing replica fails readiness only, so Kubernetes does not restart the server: its supervisor starts the replica
again. Liveness fails if only a restart of the server helps: a stage that requests need was given up (`restart_limit`),
or the coordinator has been silent for too long. The head does not end by itself then: other stages still answer, and
the operator can read `/v1/omni/status`.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Mapping
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from vllm.v1.metrics.prometheus import get_prometheus_registry

from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.observability.engine_stats import ReplicaLabels
from vllm_omni_ext.omni import AsyncOmni
from vllm_omni_ext.plugins.spec import KV
from vllm_omni_ext.runtime.control import Server
from vllm_omni_ext.serving.operator_calls import known_parameters
from vllm_omni_ext.serving.responses import BadRequest, printable

UP, DOWN = "UP", "DOWN"
LIVE, READY, STARTED = "/health/live", "/health/ready", "/health/startup"

COORDINATOR_LOST_S = 300.0
"""Silence of the coordinator after which only a restart of the server helps; the head replaces one within seconds."""

METHODS = ["GET", "HEAD"]

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

    def running(self) -> float:
        """Return the seconds since the start."""
        return self._clock() - self._since

    def never_up(self, omni: AsyncOmni) -> list[str]:
        """Return the needed stages that had their `min_replicas` neither at an earlier probe nor now."""
        needed = needed_stages(omni)
        self._seen.update(name for name in needed if _lack(omni, name) is None)
        return [name for name in needed if name not in self._seen]


def add_routes(app: FastAPI) -> None:
    """Add our routes before vLLM's, so that ours answer `/health` and `/metrics`, and the state of the probes."""
    app.state.progress = Progress()
    before = list(app.router.routes)
    app.include_router(router)
    app.router.routes[:] = [route for route in app.router.routes if route not in before] + before


@router.api_route("/health", methods=METHODS, include_in_schema=False)
async def health(request: Request, kind: str | None = None) -> JSONResponse:
    """Status 200 while requests can be served, else 503; see `_obstacles`."""
    omni: AsyncOmni = request.app.state.engine_client
    live, names = omni.orchestrator.pools, omni.replica_connections.replica_names
    stages = {
        stage.name: {"up": len(live[stage.name].replicas), "replicas": len(names(stage.name))}
        for stage in omni.plan.stages
    }
    reasons, facts = _obstacles(omni, kind), {"stages": stages, "requests": _requests(omni)}
    return _answer(reasons, ("healthy", "unhealthy"), facts)


@router.api_route(LIVE, methods=METHODS, include_in_schema=False)
async def live(request: Request) -> JSONResponse:
    """Status 200 unless only a restart of the server helps; a replica that is started again is no reason."""
    omni: AsyncOmni = request.app.state.engine_client
    if omni.draining:
        return _answer([])
    watcher = omni.replica_connections.watcher
    silence = 0.0 if watcher is None else min(watcher.age(), request.app.state.progress.running())
    reasons = ["the engine client has failed"] if omni.errored else []
    if silence > COORDINATOR_LOST_S:
        reasons.append(f"the coordinator has been silent for {silence:.0f} s")
    if (stage := omni.orchestrator.unavailable(needed_stages(omni))) is not None:
        reasons.append(f"stage '{stage}' has no replica, and none is started again (restart_limit)")
    return _answer(reasons)


@router.api_route(READY, methods=METHODS, include_in_schema=False)
async def ready(request: Request, kind: str | None = None) -> JSONResponse:
    """Status 200 while requests can be served, else 503; see `_obstacles`."""
    omni: AsyncOmni = request.app.state.engine_client
    request.app.state.progress.never_up(omni)
    return _answer(_obstacles(omni, kind))


@router.api_route(STARTED, methods=METHODS, include_in_schema=False)
async def started(request: Request) -> JSONResponse:
    """Status 200 once every stage that requests need has had its `min_replicas`, even if it has fewer now."""
    missing = request.app.state.progress.never_up(request.app.state.engine_client)
    return _answer([f"stage '{name}' has not been up yet" for name in missing])


def _answer(
    reasons: list[str], words: tuple[str, str] = ("ok", "failed"), facts: Mapping[str, Any] | None = None
) -> JSONResponse:
    if not reasons:
        return JSONResponse({"status": words[0], **(facts or {})})
    body = {"status": words[1], "reason": "; ".join(reasons), **(facts or {})}
    return JSONResponse(body, HTTPStatus.SERVICE_UNAVAILABLE)


def _obstacles(omni: AsyncOmni, kind: str | None) -> list[str]:
    """Return the reasons for which requests cannot be served: shutdown, failure, and stages below `min_replicas`.

    Args:
        kind: only stages that requests of this kind need count; None: those that any kind needs.

    Raises:
        BadRequest: there is no such kind.
    """
    routes = omni.capabilities.routes
    if kind is not None and kind not in routes:
        allowed = ", ".join(routes) or "none"
        raise BadRequest(f"kind: '{printable(kind)}' is unknown; use one of {allowed}", parameter="kind")
    if omni.draining:
        return ["the server is shutting down"]
    if omni.errored:
        return ["the engine client has failed"]
    names = needed_stages(omni, None if kind is None else routes[kind])
    return [lack for name in names if (lack := _lack(omni, name)) is not None]


def _requests(omni: AsyncOmni) -> dict[str, str]:
    """Return UP for each kind of requests whose needed stages all have a live replica, else DOWN."""
    return {
        kind: UP if all(_live(omni, name) for name in needed_stages(omni, needed)) else DOWN
        for kind, needed in omni.capabilities.routes.items()
    }


def needed_stages(omni: AsyncOmni, needed: Collection[str] | None = None) -> list[str]:
    """Return the names of stages that requests need; `needed=None`: those that any kind of request needs."""
    if needed is None:
        needed = {name for each in omni.capabilities.routes.values() for name in each}
    return [stage.name for stage in omni.plan.model_stages() if not needed or stage.model_stage in needed]


def _lack(omni: AsyncOmni, stage: str) -> str | None:
    """Return a sentence about a stage with fewer live replicas than its `min_replicas`; None if it has enough."""
    wanted, live = omni.plan.config.stage(stage).min_replicas, len(_live(omni, stage))
    if wanted == 1:
        return None if live else f"stage '{stage}' has no live replica"
    return f"stage '{stage}' has {live} of the {wanted} replicas it needs" if live < wanted else None


def _live(omni: AsyncOmni, stage: str) -> tuple[ReplicaId, ...]:
    return omni.orchestrator.pools[stage].replicas


@router.get("/metrics", include_in_schema=False)
def metrics() -> Response:
    """Return all metrics, as vLLM does."""
    metrics: Any = ReplicaLabels(get_prometheus_registry())
    return Response(generate_latest(metrics), media_type=CONTENT_TYPE_LATEST)


@router.get("/v1/omni/status", dependencies=[known_parameters()])
async def status(request: Request) -> dict[str, Any]:
    """Return every process with its load.

    In `kv_edges`, `handed` and `fetching` count the requests of this API server.
    """
    omni: AsyncOmni = request.app.state.engine_client
    connections = omni.replica_connections
    pairs = [
        {"source": str(p.source), "target": str(p.target), "handed": p.handed, "fetching": p.fetching}
        for p in omni.orchestrator.pairs()
    ]
    servers = connections.servers or (Server(omni.connections.client_index, os.getpid(), True, 0),)
    return {
        "stages": [
            {
                "name": stage.name,
                "replicas": [_replica(omni, replica) for replica in connections.replica_names(stage.name)],
            }
            for stage in omni.plan.stages
        ],
        "requests": _requests(omni),
        "kv_edges": [
            {"source": edge.source, "target": edge.target, "connector": split.connector, "pairs": pairs}
            for edge in omni.plan.edges
            if edge.kind == KV and (split := omni.plan.config.stage(edge.target).prefill_decode) is not None
        ],
        "coordinator": _coordinator(omni),
        "api_servers": [
            {"index": each.index, "pid": each.pid, "state": UP if each.up else DOWN, "restarts": each.restarts}
            for each in servers
        ],
        "uptime_s": round(time.time() - omni.connections.started, 3),
    }


def _replica(omni: AsyncOmni, replica: ReplicaId) -> dict[str, Any]:
    about, report = omni.replica_connections.about[replica], omni.replica_connections.reports.get(replica)
    load = None if report is None else report.entry.load
    # Statistics in engine outputs reach only one API server; the coordinator sends them to all.
    running, waiting = omni.observer.loads.get(replica, (0, 0)) if load is None else (load.running, load.waiting)
    return {
        "id": str(replica),
        "state": omni.replica_connections.state(replica),
        "host": about.host,
        "pid": about.pid,
        "running": running,
        "waiting": waiting,
        "restarts": about.restarts,
        "heartbeat_age_s": None if report is None else round(time.monotonic() - report.last_seen, 3),
    }


def _coordinator(omni: AsyncOmni) -> dict[str, Any] | None:
    watcher = omni.replica_connections.watcher
    if watcher is None:
        return None
    age = watcher.age()
    return {
        "state": UP if watcher.fresh else DOWN,
        "pid": (watcher.view.pid or None) if watcher.view is not None else None,
        "view_age_s": round(age, 3) if math.isfinite(age) else None,
    }
