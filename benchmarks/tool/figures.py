"""Formats numbers and the environment of a run for the HTML page and the Markdown page."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.tool.results import Comparison, Environment, Report

MANY = 100
BUSY = 0.1
"""Largest share of cores in use on an idle machine."""


def number(value: float) -> str:
    """Return a number as text: three significant digits, or a whole number from 100 on."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def spread(values: Sequence[float]) -> str:
    """Return text with the median; for several values also the smallest and largest, from `MANY` on also the p99."""
    middle = number(statistics.median(values))
    if len(values) == 1:
        return middle
    late = f", p99 {number(statistics.quantiles(values, n=100)[-1])}" if len(values) >= MANY else ""
    return f"{middle} ({number(min(values))} to {number(max(values))}{late})"


def ratio(each: Comparison) -> str:
    """Return text with the ratio of the medians, and for paired samples the smallest and largest ratio of a pair."""
    if each.ratio is None:
        return "none, the baseline is 0"
    pairs = f" ({min(each.ratios):.2f} to {max(each.ratios):.2f})" if len(each.ratios) > 1 else ""
    return f"{each.ratio:.2f}{pairs}"


def where(environment: Environment) -> list[tuple[str, str]]:
    """Return (name, value) rows that describe an environment."""
    return [
        ("measured", environment.time),
        ("this package", f"{environment.package}, commit {environment.commit}"),
        ("vLLM", f"{environment.vllm}; {environment.torch}; Python {environment.python}"),
        ("machine", f"{environment.cpu}, {environment.cores} cores, {environment.memory_gib:g} GiB"),
        ("accelerator", environment.accelerator),
        ("load average before, after", ", ".join(f"{load:g}" for load in environment.load)),
        *([("cores in use before a benchmark", f"{max(environment.busy):.0%} at most")] if environment.busy else []),
    ]


def busy(report: Report) -> bool:
    """Return whether more than a tenth of the cores was in use when the run, or one of its benchmarks, began."""
    seen = report.environment
    if seen is None:
        return False
    return max(seen.busy) > BUSY if seen.busy else bool(seen.load) and seen.load[0] > BUSY * seen.cores
