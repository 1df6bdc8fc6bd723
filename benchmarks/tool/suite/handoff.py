"""The cost of transfers between stages with many small messages, compared with one message for all."""

from __future__ import annotations

from typing import Any

from benchmarks.tool.description import Description, Options, program
from benchmarks.tool.results import Comparison, Result

DESCRIPTION = Description(
    name="handoff",
    compares="an answer that is handed over with a message for every token, then for every frame",
    baseline="the same answer with one message for all",
    quick={"length": 20, "rounds": 1},
    full={"length": 200, "rounds": 5},
    memory_gib=8,
    cannot_show="hand-over between hosts; CPU time is that of the whole answer, in which computing is the most.",
)


def comparisons(found: list[dict[str, Any]]) -> list[Comparison]:
    """Compare bytes and CPU time of an answer, for each edge, i.e. each connection between two stages."""
    made = []
    for edge in found:
        single, whole = edge["single"], edge["whole"]
        names = (f"{edge['edge']}, a message each", f"{edge['edge']}, one message")
        bytes_ = [[turn["bytes"] for turn in turns] for turns in (single, whole)]
        cpu = [[1e3 * sum(turn["cpu"].values()) for turn in turns] for turns in (single, whole)]
        made.append(Comparison("bytes of an answer", "bytes", *names, *bytes_, paired=True))
        made.append(Comparison("CPU time of an answer", "ms", *names, *cpu, paired=True))
    return made


def run(options: Options) -> Result:
    """Run `handoff_cost.py`, which measures many messages and one message on the same engines; compare its results."""
    found = program("handoff_cost.py", options, DESCRIPTION.sizes(options))
    return Result(DESCRIPTION.name, comparisons=comparisons(found))
