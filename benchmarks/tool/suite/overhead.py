"""Tokens a second of the text stage, compared with stock vLLM."""

from __future__ import annotations

from typing import Any

from benchmarks.tool.description import Description, Options, program
from benchmarks.tool.results import Comparison, Result

DESCRIPTION = Description(
    name="overhead",
    compares="tokens a second of the text stage, 1 and 8 answers at once",
    baseline="stock vLLM's engine with the same checkpoint, arguments and environment, taking turns",
    quick={"tokens": 32, "rounds": 2},
    full={"tokens": 256, "rounds": 12},
    memory_gib=8,
    cannot_show="a stage that is busy: with a tiny model nearly all of the time is the code around it.",
)
ANSWERS = (1, 8)


def comparison(answers: int, found: dict[str, list[float]]) -> Comparison:
    """Compare our speeds and stock vLLM's in the output of `thinker_decode.py`.

    Args:
        answers: number of concurrent answers.
    """
    what = f"decode, {answers} at once"
    return Comparison(what, "tokens/s", "ours", "stock vLLM", found["ours"], found["stock"], True, True)


def run(options: Options) -> Result:
    """Run `thinker_decode.py` once for each number of concurrent answers, and compare its results."""
    sizes: dict[str, Any] = dict(DESCRIPTION.sizes(options))
    found = {n: program("thinker_decode.py", options, sizes | {"concurrency": n}) for n in ANSWERS}
    return Result(DESCRIPTION.name, comparisons=[comparison(n, each) for n, each in found.items()])
