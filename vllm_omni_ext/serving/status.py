"""`/health`, `/v1/omni/status` and `/v1/omni/trace/{request_id}`."""

from __future__ import annotations

import math
import os
import time
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response

from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.model_plugins.registry import KV
from vllm_omni_ext.observability.record import as_trace
from vllm_omni_ext.omni import AsyncOmni
from vllm_omni_ext.serving.parameters import KnownParameters
from vllm_omni_ext.topology.shape import StagePlan
from vllm_omni_ext.wire.control import Server

UP, DOWN = "UP", "DOWN"

router = APIRouter()


def add_routes(app: FastAPI) -> None:
    """Put our routes before vLLM's, of which `/health` has the same path."""
    before = list(app.router.routes)
    app.include_router(router)
    app.router.routes[:] = [route for route in app.router.routes if route not in before] + before


@router.api_route("/health", methods=["GET", "HEAD"], include_in_schema=False)
async def health(request: Request) -> JSONResponse:
    """200 while every stage that requests need has a live replica, else 503 with the stages that have none."""
    omni: AsyncOmni = request.app.state.engine_client
    stages = {stage.name: _count(omni, stage) for stage in omni.plan.stages}
    without = [stage.name for stage in omni.plan.model_stages() if not stages[stage.name]["up"]]
    reasons = [f"stage '{name}' has no live replica" for name in without]
    if omni.errored and not reasons:
        reasons = ["the engine client has failed"]
    if not reasons:
        return JSONResponse({"status": "healthy", "stages": stages})
    body = {"status": "unhealthy", "reason": "; ".join(reasons), "stages": stages}
    return JSONResponse(body, HTTPStatus.SERVICE_UNAVAILABLE)


@router.get("/v1/omni/status", dependencies=[Depends(KnownParameters())])
async def status(request: Request) -> dict[str, Any]:
    """Every process, and what it has to do."""
    omni: AsyncOmni = request.app.state.engine_client
    return {
        "stages": [
            {"name": stage.name, "replicas": [_replica(omni, replica) for replica in omni.fleet.known(stage.name)]}
            for stage in omni.plan.stages
        ],
        "kv_edges": _kv_edges(omni),
        "coordinator": _coordinator(omni),
        "api_servers": _api_servers(omni),
        "uptime_s": round(time.time() - omni.connections.started, 3),
    }


@router.get("/v1/omni/trace/{request_id}", dependencies=[Depends(KnownParameters())])
async def trace(request_id: str, request: Request) -> Response:
    """One request as a trace file for Perfetto or chrome://tracing; one of another API server when it has ended."""
    omni: AsyncOmni = request.app.state.engine_client
    record = omni.observer.course(request_id)
    if record is not None:
        return JSONResponse(as_trace(record))
    if omni.trace_files is not None and (kept := omni.trace_files.read(request_id)) is not None:
        return Response(kept, media_type="application/json")
    message = f"nothing is kept about request '{request_id}'; send it with return_stage_metrics: true"
    error = {"message": message, "type": "NotFoundError", "param": "request_id", "code": 404}
    return JSONResponse({"error": error}, HTTPStatus.NOT_FOUND)


def _live(omni: AsyncOmni, stage: str) -> tuple[ReplicaId, ...]:
    return omni.orchestrator.pools[stage].replicas


def _count(omni: AsyncOmni, stage: StagePlan) -> dict[str, int]:
    return {"up": len(_live(omni, stage.name)), "replicas": len(omni.fleet.known(stage.name))}


def _replica(omni: AsyncOmni, replica: ReplicaId) -> dict[str, Any]:
    about, report = omni.fleet.about[replica], omni.fleet.reports.get(replica)
    load = None if report is None else report.entry.load
    # What its scheduler says with its outputs goes to one API server; the coordinator tells all.
    running, waiting = omni.observer.loads.get(replica, (0, 0)) if load is None else (load.running, load.waiting)
    return {
        "id": str(replica),
        "state": omni.fleet.state(replica),
        "host": about.host,
        "pid": about.pid,
        "running": running,
        "waiting": waiting,
        "restarts": about.restarts,
        "heartbeat_age_s": None if report is None else round(time.monotonic() - report.heard, 3),
    }


def _kv_edges(omni: AsyncOmni) -> list[dict[str, Any]]:
    """Which replicas compute prompts for which; `handed` and `fetching` count requests of this API server."""
    return [
        {"source": edge.source, "target": edge.target, "connector": split.connector, "pairs": _pairs(omni)}
        for edge in omni.plan.edges
        if edge.kind == KV and (split := omni.plan.config.stage(edge.target).prefill_decode) is not None
    ]


def _pairs(omni: AsyncOmni) -> list[dict[str, Any]]:
    return [
        {"source": str(p.source), "target": str(p.target), "handed": p.handed, "fetching": p.fetching}
        for p in omni.orchestrator.way.pairs()
    ]


def _api_servers(omni: AsyncOmni) -> list[dict[str, Any]]:
    known = omni.fleet.servers or (Server(omni.connections.client_index, os.getpid(), True, 0),)
    return [
        {"index": each.index, "pid": each.pid, "state": UP if each.up else DOWN, "restarts": each.restarts}
        for each in known
    ]


def _coordinator(omni: AsyncOmni) -> dict[str, Any] | None:
    watcher = omni.fleet.watcher
    if watcher is None:
        return None
    age = watcher.age()
    return {"state": UP if watcher.fresh else DOWN, "view_age_s": round(age, 3) if math.isfinite(age) else None}
