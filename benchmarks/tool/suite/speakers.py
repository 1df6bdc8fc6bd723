"""Time of spoken answers, compared with the simulated time that they take on devices."""

from __future__ import annotations

from typing import Any

from benchmarks.tool.description import Description, Options, program
from benchmarks.tool.results import Comparison, Result

DESCRIPTION = Description(
    name="speakers",
    compares="a spoken answer, a step of the talker, and the API server's CPU time for it, with 1, 32 and 64 speakers; "
    "no model is computed",
    baseline="the simulated time of the device alone",
    quick={"speakers": [2], "seconds": 3},
    full={"speakers": [1, 32, 64], "seconds": 20},
    memory_gib=8,
    cannot_show="HTTP, hidden states, and stages that share a device or memory; the steps of a real device vary.",
)


def comparisons(found: list[dict[str, Any]]) -> list[Comparison]:
    """Compare answers, talker steps and CPU time with the device's time, for each number of concurrent answers."""
    made = []
    for each in found:
        who = f"speakers: {each['speakers']}"
        device = [1e3 * seconds for seconds in each["device"]]
        answers, steps = ([1e3 * seconds for seconds in each[name]] for name in ("answers", "intervals"))
        alone = [1e3 * each["answer_device"]]
        made.append(Comparison(f"answer, {who}", "ms", "measured", "the talker's device", answers, alone))
        made.append(Comparison(f"step of the talker, {who}", "ms", "from step to step", "its device", steps, device))
        cpu = [1e3 * each["own_cpu"] / each["steps"]]
        made.append(Comparison(f"CPU time of a talker's step, {who}", "ms", "API server", "its device", cpu, device))
    return made


def run(options: Options) -> Result:
    """Run `speakers.py`, which measures all numbers of concurrent answers on the same engines; compare its results."""
    found = program("speakers.py", options, DESCRIPTION.sizes(options))
    return Result(DESCRIPTION.name, comparisons=comparisons(found))
