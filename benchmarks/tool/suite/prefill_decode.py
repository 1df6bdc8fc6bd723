"""Prefill/decode disaggregation: times of long answers while long prompts arrive."""

from __future__ import annotations

from typing import Any

from benchmarks.tool.description import Description, Options, program
from benchmarks.tool.results import Comparison, Result

APART, BOTH = "1 prefills, 1 decodes", "2 do both"

DESCRIPTION = Description(
    name="prefill_decode",
    compares="first token and gaps between tokens with one replica for prefill and one for decode",
    baseline="two replicas that do both, with the same simulated device time",
    quick={"writers": 2, "rate": 1, "seconds": 3},
    full={"writers": 6, "rate": 1.5, "seconds": 20},
    memory_gib=8,
    cannot_show="transfers over a fast network: KV caches go through memory of the host.",
)
KINDS = {"writers": "those who read long answers", "readers": "those who send long prompts"}


def comparisons(found: dict[str, Any]) -> list[Comparison]:
    """Compare times to the first token and between tokens, for each kind of client in `KINDS`, in both topologies."""
    made = []
    for kind, who in KINDS.items():
        for key, what in (("first", "first token"), ("gaps", "gap between tokens")):
            apart, both = ([1e3 * seconds for seconds in found[topology][kind][key]] for topology in (APART, BOTH))
            if apart and both:
                made.append(Comparison(f"{what}, {who}", "ms", APART, BOTH, apart, both))
    return made


def run(options: Options) -> Result:
    """Run `pd.py`, which measures one topology after the other, and compare its results."""
    found = program("pd.py", options, DESCRIPTION.sizes(options))
    return Result(DESCRIPTION.name, comparisons=comparisons(found))
