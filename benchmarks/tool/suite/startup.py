"""Seconds from the command to `/health`, compared with stock vLLM's server of the text stage alone."""

from __future__ import annotations

from typing import Any

from benchmarks.tool.description import Description, Options, program
from benchmarks.tool.results import Comparison, Result

DESCRIPTION = Description(
    name="startup",
    compares="`vllm serve --omni` with all stages, from the command to `/health`",
    baseline="stock `vllm serve`, which starts the text stage alone",
    quick={"runs": 1},
    full={"runs": 5},
    memory_gib=8,
    cannot_show="how long real weights take to load; the baseline starts fewer engines.",
)


def comparisons(found: dict[str, Any]) -> list[Comparison]:
    """Compare the seconds from command to `/health` in the output of `startup.py`."""
    ours, stock = ([start["seconds"] for start in found[who]] for who in ("ours", "stock"))
    return [
        Comparison("command to /health", "s", "ours, all stages", "stock vLLM, text stage", ours, stock, paired=True)
    ]


def run(options: Options) -> Result:
    """Run `startup.py`, which starts our server and stock vLLM's in turns, and compare their seconds to `/health`."""
    return Result(DESCRIPTION.name, comparisons=comparisons(program("startup.py", options, DESCRIPTION.sizes(options))))
