"""Formats a plan and the memory of its devices: as text for people, and as plain data for programs. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from vllm_omni_ext.plugins.spec import KV, EdgeSpec
from vllm_omni_ext.topology.agreement import config_hash
from vllm_omni_ext.topology.memory import Sheet, gib
from vllm_omni_ext.topology.plan import Headless, Plan, ReplicaPlan, StagePlan

CACHE_TYPE, SHARED_CACHE = "mm_processor_cache_type", "shm"
"""vLLM's engine argument for the multimodal processor cache, and its value for a cache in shared memory."""

_PARTS = ("weights", "activations", "graphs", "buffers", "context")
"""Attributes of `topology.memory.Need` that the memory table has for each replica, in bytes."""

_COLUMNS = ("GiB", "weights", "KV cache", "activations", "graphs", "buffers", "context", "sum", "KV tokens")
_ROW = "  {:<{names}}{:>9}{:>10}{:>13}{:>8}{:>9}{:>9}{:>8}{:>12}"

_SECRETS = frozenset({"hf_token"})
_SECRET_MARKS = ("TOKEN", "SECRET", "PASSWORD", "API_KEY")


def explain(plan: Plan, headless: Headless | None = None) -> str:
    """Return the plan as text: process tree, edges, settings, memory, and each stage's changes to vLLM's defaults.

    Args:
        headless: settings of the process if it runs replicas that join another server's head; else None.
    """
    lines = [f"model     {plan.model}", f"pipeline  {plan.pipeline}", f"machine   {_machine(plan)}", "", "processes"]
    lines += [f"  {line}" for line in _processes(plan, headless)]
    lines += ["", "hand-overs"]
    lines += [f"  {_edge(plan, edge)}" for edge in plan.edges]
    lines += ["", "settings", *_settings(plan)]
    if plan.sheets:
        lines += ["", "memory", *memory_lines(plan.sheets)]
    for stage in plan.stages:
        lines += ["", *_stage(plan, stage)]
    return "\n".join(lines) + "\n"


def as_json(plan: Plan, headless: Headless | None = None) -> dict[str, Any]:
    """Return the plan as plain JSON data, with the same content as the text of `explain`."""
    config = asdict(plan.config)
    del config["stages"]
    return {
        "model": plan.model,
        "family": plan.family,
        "pipeline": plan.pipeline,
        "machine": asdict(plan.machine),
        "api_servers": 0 if headless else plan.api_servers,
        "headless": asdict(headless) if headless else None,
        "config": config,
        "chunks": _plain(plan.chunks),
        "connectors": _plain(plan.connectors),
        "edges": [asdict(edge) for edge in plan.edges],
        "memory": memory_data(plan.sheets),
        "stages": [
            {
                "name": stage.name,
                "part_of": stage.part_of,
                "frontend": stage is plan.frontend(),
                "accepts": stage.accepts,
                "config_hash": config_hash(plan, stage.name),
                "engine_args": _plain(_visible(stage.engine_args)),
                "env": _visible(stage.env),
                "params": _plain(stage.params),
                "replicas": [{"id": str(r.id), "devices": list(r.devices)} for r in stage.replicas],
            }
            for stage in plan.stages
        ],
    }


def _edge(plan: Plan, edge: EdgeSpec) -> str:
    line = f"{edge.source} -> {edge.target}  {edge.kind}"
    if edge.kind == KV and (split := plan.config.stage(edge.target).prefill_decode) is not None:
        line = f"{line}, {split.connector}"
    if not edge.name:
        return line
    if edge.name in plan.connectors:
        return f"{line}, {edge.name} over {plan.connectors[edge.name]['name']}"
    sizes = plan.chunks[edge.name]
    return f"{line}, {edge.name} in chunks of {sizes if isinstance(sizes, str) else ', '.join(map(str, sizes))}"


def unshared_caches(plan: Plan) -> list[str]:
    """Return a line for each reason why processes of this plan cannot share a multimodal processor cache.

    The server prints the lines when it starts.
    """
    lines = []
    if plan.api_servers > 1:
        lines.append(f"{plan.api_servers} API servers, each with its own multimodal processor cache; none is shared")
    if any(stage.engine_args.get(CACHE_TYPE) == SHARED_CACHE for stage in plan.stages):
        lines.append(
            f"warning: {CACHE_TYPE}: {SHARED_CACHE} is switched off: one API server and one engine can share a cache, "
            "and here each engine has several API servers, or each API server several engines; "
            "media are kept where they are processed"
        )
    return lines


def _machine(plan: Plan) -> str:
    machine, devices = plan.machine, ""
    if machine.platform == "cuda":
        sizes = " and ".join(sorted({gib(size) for size in machine.device_bytes}))
        devices = f"{machine.device_count} devices{f' of {sizes} GiB' if sizes else ''}, "
    return f"{machine.platform}, {devices}{machine.cpu_count} cores, {gib(machine.memory_bytes)} GiB memory"


def _processes(plan: Plan, headless: Headless | None) -> list[str]:
    if headless:
        host, port = headless.head
        replicas = (_replica(replica, headless.stage) for replica in plan.replicas())
        return [f"headless, joins {host} port {port}", *(f"|- {replica}" for replica in replicas)]
    children = ["coordinator", *(f"api_server {index}" for index in range(plan.api_servers))]
    children += [_replica(replica, str(replica.id)) for replica in plan.replicas()]
    return ["head", *(f"|- {child}" for child in children)]


def _replica(replica: ReplicaPlan, name: str) -> str:
    if not replica.devices:
        return name
    return f"{name}  device {','.join(map(str, replica.devices))}"


def _settings(plan: Plan) -> list[str]:
    config = plan.config
    limit = config.timeouts.request_limit_s
    logs = f"in {config.log_dir}" if config.log_dir else "in a temporary folder, kept if a replica has ended"
    return _table(
        {
            "async_chunk": str(config.async_chunk).lower(),
            "startup timeout": f"{config.timeouts.startup_timeout_s:g} s",
            "request deadline": "none" if limit is None else f"{limit:g} s",
            "logs": "on this terminal" if config.verbose else logs,
        }
    )


def _stage(plan: Plan, stage: StagePlan) -> list[str]:
    count = len(stage.replicas)
    number = f"{count} replica{'' if count == 1 else 's'}{'' if count else ' here'}"
    lines = [f"stage {stage.name}: {number}{', the frontend' if stage is plan.frontend() else ''}"]
    lines[0] += "".join(
        f", computes the prompts of {e.target}" for e in plan.edges if e.kind == KV and e.source == stage.name
    )
    for title, values in (("engine", stage.engine_args), ("params", stage.params), ("env", stage.env)):
        if values:
            lines += [f"  {title}", *(f"  {line}" for line in _table(_visible(values)))]
    return lines


def _table(values: Mapping[str, Any]) -> list[str]:
    width = max(len(name) for name in values)
    return [f"  {name.ljust(width)}  {_value(name, values[name])}" for name in sorted(values)]


def _value(name: str, value: Any) -> str:
    if name.endswith("_bytes") and isinstance(value, int):
        return f"{value} ({value / (1 << 20):g} MiB)"
    return str(value)


def _visible(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: "***" if value and _is_secret(name) else value for name, value in values.items()}


def _is_secret(name: str) -> bool:
    return name in _SECRETS or (name.isupper() and any(mark in name for mark in _SECRET_MARKS))


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=lambda each: dict(each) if isinstance(each, Mapping) else str(each)))


def memory_lines(sheets: Sequence[Sheet]) -> list[str]:
    """Return a table of the memory of each replica, and the free memory, in GiB: a block of lines for each device."""
    names = max([len("free"), *(len(share.replica) for sheet in sheets for share in sheet.shares)])
    lines = []
    for sheet in sheets:
        rows: list[tuple[str, ...]] = [_COLUMNS]
        for share in sheet.shares:
            n = share.need
            sizes = (n.weights, share.kv_bytes, n.activations, n.graphs, n.buffers, n.context, share.total)
            rows.append((share.replica, *map(gib, sizes), f"{share.kv_tokens:,}" if n.kv_token else "-"))
        rows.append(("free", *[""] * 6, gib(sheet.free), ""))
        lines.append(f"  device {sheet.device}: {gib(sheet.device_bytes)} GiB, {gib(sheet.usable)} of it to hand out")
        lines += [_ROW.format(*row, names=names).rstrip() for row in rows]
    return lines


def memory_data(sheets: Sequence[Sheet]) -> list[dict[str, Any]]:
    """Return the memory of each device and replica as plain data, in bytes and tokens."""
    return [
        {
            "device": sheet.device,
            "bytes": sheet.device_bytes,
            "usable_bytes": sheet.usable,
            "free_bytes": sheet.free,
            "replicas": [
                {
                    "id": share.replica,
                    "kv_cache_bytes": share.kv_bytes,
                    "kv_cache_tokens": share.kv_tokens,
                    **{f"{part}_bytes": getattr(share.need, part) for part in _PARTS},
                }
                for share in sheet.shares
            ],
        }
        for sheet in sheets
    ]
