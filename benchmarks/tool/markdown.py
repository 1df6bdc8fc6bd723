"""Writes the report of a run as the Markdown page docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.tool import figures as numbers
from benchmarks.tool.html import warnings
from benchmarks.tool.results import Report, Result
from benchmarks.tool.suite import BENCHMARKS

HEAD = """# Benchmarks

Written by `python -m benchmarks --markdown`; do not edit. Every figure is compared with a baseline of the same run:
medians, smallest and largest in parentheses. A ratio is the figure divided by its baseline.
"""
NOTHING = """No run of the whole program on a quiet machine is stored yet. Earlier figures are in
[benchmarks/README.md](../benchmarks/README.md)."""


def cells(*words: str) -> str:
    """Return a row of a Markdown table."""
    return "| " + " | ".join(word.replace("|", "\\|") for word in words) + " |"


def table(result: Result) -> Iterator[str]:
    """Yield the lines of the table of one benchmark."""
    yield cells("what", "measured", "baseline", "ratio", "better")
    yield "|---|---|---|---|---|"
    for each in result.comparisons:
        subject = f"{each.subject}: {numbers.spread(each.samples)}"
        baseline = f"{each.baseline}: {numbers.spread(each.baseline_samples)}"
        better = "more" if each.more_is_better else "less"
        yield cells(f"{each.what}, {each.unit}", subject, baseline, numbers.ratio(each), better)


def figures(report: Report) -> str:
    """Return the tables of all benchmarks of a report, with the reasons of those that failed or did not run."""
    lines = []
    for result in report.results:
        lines += [f"### {result.name}", ""]
        reason = (result.failed or "").partition("\n")[0]
        lines += [f"No figures: {reason}"] if result.failed is not None else table(result)
        lines.append("")
    lines += [f"`{name}` did not run: {why}.\n" for name, why in report.left_out.items()]
    return "\n".join(lines).rstrip("\n")


def measured(report: Report) -> Iterator[str]:
    """Yield the lines of the section with the environment and the figures."""
    yield "## Measured\n"
    if not report.results or report.environment is None:
        yield NOTHING + "\n"
        return
    for line in warnings(report):
        yield f"**{line}**\n"
    for name, value in numbers.where(report.environment):
        yield f"- {name}: {value}"
    yield f"- model: {report.model or 'a tiny random checkpoint'}\n"
    yield figures(report) + "\n"


def compared() -> Iterator[str]:
    """Yield the lines of the table of all benchmarks: what each compares, its baseline, and what it does not show."""
    yield "## What is compared, and what it does not show\n"
    yield cells("name", "what", "baseline", "what it does not show")
    yield "|---|---|---|---|"
    for name, module in BENCHMARKS.items():
        each = module.DESCRIPTION
        yield cells(f"`{name}`", each.compares, each.baseline, each.cannot_show)
    yield ""


def page(report: Report) -> str:
    """Return the whole Markdown page; its fixed part is the file `others.md`."""
    others = Path(__file__).with_name("others.md").read_text(encoding="utf-8")
    return "\n".join([HEAD, *measured(report), *compared(), others.rstrip("\n")]) + "\n"
