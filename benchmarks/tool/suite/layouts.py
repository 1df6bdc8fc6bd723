"""Spoken answers of the whole pipeline with two talkers, compared with one."""

from __future__ import annotations

from typing import Any

from benchmarks.tool.description import Description, Options, program
from benchmarks.tool.results import Comparison, Result

DESCRIPTION = Description(
    name="layouts",
    compares="spoken answers a second, first token and first sound of the whole pipeline with two talkers",
    baseline="the same engines with one talker in use; the device time of all stages is simulated",
    quick={"rounds": 1, "seconds": 3},
    full={"rounds": 3, "seconds": 15},
    memory_gib=12,
    cannot_show="stages that share a device: a step takes a stated time whatever the others do.",
)


def comparisons(found: dict[str, Any]) -> list[Comparison]:
    """Compare each number of talkers with one talker.

    Args:
        found: rounds (`layouts.Round` as JSON) by number of talkers.
    """
    made = []
    for talkers in (each for each in found if each != "1"):
        pair, names = (found[talkers], found["1"]), (f"{talkers} talkers", "1 talker")
        made.append(Comparison("spoken answers a second", "/s", *names, *map(rates, pair), more_is_better=True))
        for name in ("first_token", "first_sound"):
            made.append(Comparison(name.replace("_", " "), "ms", *names, *(times(each, name) for each in pair)))
    return made


def rates(rounds: list[dict[str, Any]]) -> list[float]:
    """Return the answers a second of each round."""
    return [each["ended"] / each["seconds"] for each in rounds]


def times(rounds: list[dict[str, Any]], name: str) -> list[float]:
    """Return the times `name` ("first_token" or "first_sound") of all answers of all rounds, in milliseconds."""
    return [1e3 * seconds for each in rounds for seconds in each[name]]


def run(options: Options) -> Result:
    """Run `layouts.py`, which measures all numbers of talkers on the same engines, and compare its results."""
    found = program("layouts.py", options, DESCRIPTION.sizes(options))
    return Result(DESCRIPTION.name, comparisons=comparisons(found))
