"""Time to the first sound with hand-over between stages in chunks, compared with one message for everything."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.tool.description import Description, Options, program
from benchmarks.tool.results import Comparison, Result, Span, Timeline

DESCRIPTION = Description(
    name="first_audio",
    compares="time to the first sound with hand-over in chunks, and what each stage took of it",
    baseline="the same engines with chunks off",
    quick={"rounds": 1},
    full={"rounds": 8},
    memory_gib=8,
    cannot_show="what a model of real size takes: its steps are longer, the code around them is the same.",
)


def comparisons(found: dict[str, Any]) -> list[Comparison]:
    """Return one comparison for each kind of prompt."""
    made = []
    for name, case in found.items():
        on, off = ([1e3 * line["first"] for line in case[which]] for which in ("on", "off"))
        made.append(Comparison(f"first sound, {name}", "ms", "chunks", "chunks off", on, off, paired=True))
    return made


def timelines(found: dict[str, Any]) -> list[Timeline]:
    """Return, for each kind of prompt, the steps of the answer with chunks whose time is nearest to the median."""
    made = []
    for name, case in found.items():
        middle = statistics.median(line["first"] for line in case["on"])
        line = min(case["on"], key=lambda line: abs(line["first"] - middle))
        spans = [Span(stage, start, end) for stage, start, end in line["spans"]]
        made.append(Timeline(f"until the first sound, {name}", spans))
    return made


def run(options: Options) -> Result:
    """Run `first_audio.py`, which measures with and without chunks on the same engines, and compare its results."""
    found = program("first_audio.py", options, DESCRIPTION.sizes(options))
    return Result(DESCRIPTION.name, comparisons=comparisons(found), timelines=timelines(found))
