"""Silence in spoken answers with our defaults, compared with code2wav in vLLM's order and a first part of one frame.

A part is the group of frames that code2wav gets in one request.
"""

from __future__ import annotations

from typing import Any

from benchmarks.tool.description import Description, Options, program
from benchmarks.tool.results import Comparison, Result

OURS, STOCK = ("priority", 2), ("fcfs", 1)

DESCRIPTION = Description(
    name="silence",
    compares="how long a spoken answer is silent because its next sound is late, and its first sound, with 1, 4 and 8 "
    "listeners",
    baseline="code2wav in the order of arrival and a first part of one frame, on engines of their own",
    quick={"listeners": [2], "rounds": 1},
    full={"listeners": [1, 4, 8], "rounds": 6},
    memory_gib=8,
    cannot_show="listeners behind a network: a piece counts as heard when it is made.",
)


def comparisons(found: list[list[Any]]) -> list[Comparison]:
    """Compare silence and time to the first sound for each number of concurrent answers ("listeners").

    Args:
        found: rows (policy, frames of the first part, listeners, answers) of `silence.py`.
    """
    heard = {(policy, first, listeners): answers for policy, first, listeners, answers in found}
    made = []
    for listeners in sorted({listeners for *_, listeners in heard}):
        ours, stock = (heard[*which, listeners] for which in (OURS, STOCK))
        for what, name in (("silence", "late_s"), ("first sound", "first_s")):
            samples = ([1e3 * answer[name] for answer in answers] for answers in (ours, stock))
            names = ("due first, two frames", "order of arrival, one frame")
            made.append(Comparison(f"{what}, listeners: {listeners}", "ms", *names, *samples))
    return made


def run(options: Options) -> Result:
    """Run `silence.py`, which measures one deployment after the other, and compare its results."""
    found = program("silence.py", options, DESCRIPTION.sizes(options))
    return Result(DESCRIPTION.name, comparisons=comparisons(found))
