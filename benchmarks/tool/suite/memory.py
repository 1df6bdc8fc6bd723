"""Memory of every process of a ready server, compared with stock vLLM's server of the text stage alone."""

from __future__ import annotations

from typing import Any

from benchmarks.tool.description import Description, Options, program
from benchmarks.tool.results import Comparison, Result

STOCK = "stock vLLM, text stage"

DESCRIPTION = Description(
    name="memory",
    compares="proportional set size (PSS) of every process of `vllm serve --omni` when it is ready",
    baseline="all processes of stock `vllm serve`, which has the text stage alone",
    quick={"runs": 1},
    full={"runs": 3},
    memory_gib=8,
    cannot_show="memory under load, and memory of a device.",
)


def comparisons(found: dict[str, Any]) -> list[Comparison]:
    """Compare the memory of all our processes, then of each of them, with that of all processes of stock vLLM."""
    ours, stock = ([start["memory_gb"] for start in found[who]] for who in ("ours", "stock"))
    whole = [sum(start.values()) for start in stock]
    made = [Comparison("all processes", "GB", "ours, all stages", STOCK, [sum(s.values()) for s in ours], whole)]
    for name in sorted({name for start in ours for name in start}):
        each = [start[name] for start in ours if name in start]
        made.append(Comparison(f"{name}, of all of the baseline", "GB", "ours", STOCK, each, whole))
    return made


def run(options: Options) -> Result:
    """Run `startup.py`, which starts our server and stock vLLM's in turns; compare the memory of their processes."""
    return Result(DESCRIPTION.name, comparisons=comparisons(program("startup.py", options, DESCRIPTION.sizes(options))))
