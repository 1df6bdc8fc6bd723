"""Items a second of a stage with several replicas, compared with one."""

from __future__ import annotations

from typing import Any

from benchmarks.tool.description import Description, Options, program
from benchmarks.tool.results import Comparison, Result

DESCRIPTION = Description(
    name="replicas",
    compares="items a second of a stage with 2 and 4 replicas, whose device time is simulated",
    baseline="the same stage with one open replica; for a step's overhead, a bare vLLM client on the same engine",
    quick={"stages": ["talker"], "replicas": [1, 2], "seconds": 2, "rounds": 1, "turns": 1, "concurrency": [1]},
    full={"stages": ["talker", "thinker"], "replicas": [1, 2, 4], "seconds": 6, "rounds": 3, "turns": 8},
    memory_gib=12,
    cannot_show="devices that share memory or power: a step takes a stated time whatever the others do.",
)


def scaling(stage: str, rates: dict[str, list[float]]) -> list[Comparison]:
    """Compare the items a second of a stage with several replicas with those of one replica."""
    return [
        Comparison(f"{stage}, items a second", "/s", f"{count} replicas", "1 replica", each, rates["1"], True)
        for count, each in rates.items()
        if count != "1"
    ]


def overhead(stage: str, rows_of: dict[str, dict[str, dict[str, float]]]) -> list[Comparison]:
    """Compare our median time of a step with that of a bare vLLM client, for each number of concurrent requests."""
    return [
        Comparison(f"{stage}, median step, {count} at once", "ms", "ours", "bare client", [ours], [bare])
        for count, rows in rows_of.items()
        for ours, bare in [(rows["ours"]["p50"], rows["bare client"]["p50"])]
    ]


def comparisons(found: dict[str, Any]) -> list[Comparison]:
    """Return the comparisons of all stages from the output of `replicas.py`."""
    made = []
    for stage, figures in found.items():
        made += scaling(stage, figures["rates"] or {}) + overhead(stage, figures["overhead_ms"])
    return made


def run(options: Options) -> Result:
    """Run `replicas.py`, which measures all numbers of replicas of a stage on the same engines; compare its results."""
    found = program("replicas.py", options, DESCRIPTION.sizes(options))
    return Result(DESCRIPTION.name, comparisons=comparisons(found))
