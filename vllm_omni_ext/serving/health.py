"""Routes `/health`, the probes of Kubernetes, `/metrics` and `/v1/omni/status`.

If a replica is missing, only readiness fails. Kubernetes does not restart the server then: the server's supervisor
starts the replica again. Liveness fails if only a restart of the server helps: a stage that requests need has no
replica and has reached its `restart_limit`, or no message of the coordinator has arrived for COORDINATOR_LOST_S. The
head (the process that started the server) does not exit then: other stages still serve requests, and the operator can
read `/v1/omni/status`.
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
"""Seconds without a message of the coordinator until liveness fails; the head restarts a coordinator within seconds."""

METHODS = ["GET", "HEAD"]

router = APIRouter()


class Progress:
    """State that the probes share: the start time of this API server, and the stages that have been up.

    Args:
        clock: monotonic clock in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = clock()
        self._seen: set[str] = set()

    def running(self) -> float:
        """Return the seconds since the start of this API server."""
        return self._clock() - self._since

    def never_up(self, omni: AsyncOmni) -> list[str]:
        """Return the stages that requests need and that have had fewer than `min_replicas` at each probe until now."""
        needed = needed_stages(omni)
        self._seen.update(name for name in needed if _lack(omni, name) is None)
        return [name for name in needed if name not in self._seen]


def add_routes(app: FastAPI) -> None:
    """Add our routes before vLLM's, so that they replace vLLM's `/health` and `/metrics`; create the probes' state."""
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
    """Status 503 if only a restart of the server helps, else 200: also while a replica is started again."""
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
    """Status 200 once every stage that requests need has had `min_replicas` live replicas, even if it has fewer now."""
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
    """Return the reasons why requests cannot be served: shutdown, failure, and stages below `min_replicas`.

    Args:
        kind: kind of request, a key of `capabilities.routes`; only the stages that such requests need are checked.
            None: the stages that any kind of request needs.

    Raises:
        BadRequest: `kind` is not in `capabilities.routes`.
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
    """Return UP or DOWN by kind of request; UP: all stages that such requests need have a live replica."""
    return {
        kind: UP if all(_live(omni, name) for name in needed_stages(omni, needed)) else DOWN
        for kind, needed in omni.capabilities.routes.items()
    }


def needed_stages(omni: AsyncOmni, needed: Collection[str] | None = None) -> list[str]:
    """Return the names, in the plan, of those stages that requests need.

    Args:
        needed: names of the stages in the plugin (`StagePlan.model_stage`); empty: all stages; None: the stages that
            any kind of request needs.
    """
    if needed is None:
        needed = {name for each in omni.capabilities.routes.values() for name in each}
    return [stage.name for stage in omni.plan.model_stages() if not needed or stage.model_stage in needed]


def _lack(omni: AsyncOmni, stage: str) -> str | None:
    """Return an error sentence if a stage has fewer live replicas than `min_replicas`, else None."""
    wanted, live = omni.plan.config.stage(stage).min_replicas, len(_live(omni, stage))
    if wanted == 1:
        return None if live else f"stage '{stage}' has no live replica"
    return f"stage '{stage}' has {live} of the {wanted} replicas it needs" if live < wanted else None


def _live(omni: AsyncOmni, stage: str) -> tuple[ReplicaId, ...]:
    return omni.orchestrator.pools[stage].replicas


@router.get("/metrics", include_in_schema=False)
def metrics() -> Response:
    """Return all Prometheus metrics of vLLM and of this package."""
    metrics: Any = ReplicaLabels(get_prometheus_registry())
    return Response(generate_latest(metrics), media_type=CONTENT_TYPE_LATEST)


@router.get("/v1/omni/status", dependencies=[known_parameters()])
async def status(request: Request) -> dict[str, Any]:
    """Return the state and load of every replica, the API servers, the coordinator, and the KV transfers.

    `kv_edges` has the pairs of a prefill and a decode replica between which KV caches of prompts were transferred. Its
    numbers `handed` (all so far) and `fetching` (now) count only requests of this API server.
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
    # An engine sends its statistics to one API server only; the coordinator sends them to all.
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
