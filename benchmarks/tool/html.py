"""Writes the report of a run as one HTML page that needs no other files."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from benchmarks.tool import figures, svg
from benchmarks.tool.results import Comparison, Report, Result
from benchmarks.tool.suite import BENCHMARKS

STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse;margin:1rem 0}td,th{border:1px solid #ccc;padding:.3rem .6rem;text-align:left}
svg{width:100%;height:auto;font-size:12px}pre{background:#f4f4f4;padding:1rem;overflow-x:auto}
.warning{border-left:4px solid #c2571a;padding-left:1rem}"""


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Return an HTML table of text cells; no head row if `head` is empty."""
    lines = ["".join(f"<th>{escape(cell)}</th>" for cell in head)] if head else []
    lines += ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def row(each: Comparison) -> tuple[str, ...]:
    """Return the cells of a comparison: what, measured, baseline, ratio, and whether more or less is better."""
    better = "more" if each.more_is_better else "less"
    subject, baseline = (
        f"{name}: {figures.spread(values)}"
        for name, values in ((each.subject, each.samples), (each.baseline, each.baseline_samples))
    )
    return (f"{each.what}, {each.unit}", subject, baseline, figures.ratio(each), better)


def section(result: Result) -> Iterator[str]:
    """Yield the HTML lines of the section of one benchmark."""
    yield f"<h2>{escape(result.name)}</h2>"
    known = BENCHMARKS.get(result.name)
    if known is not None:
        described = known.DESCRIPTION
        yield f"<p>{escape(described.compares)}; the baseline is {escape(described.baseline)}.</p>"
        yield f"<p>What this does not show: {escape(described.cannot_show)}</p>"
    if result.failed is not None:
        yield f"<p class=warning>No figures: it failed.</p><pre>{escape(result.failed)}</pre>"
        return
    yield table(("what", "measured", "baseline", "ratio", "better"), [row(each) for each in result.comparisons])
    for line in result.timelines:
        yield f"<h3>{escape(line.title)}</h3>{svg.timeline(line.title, line.spans)}"
    for each in result.comparisons:
        yield f"<h3>{escape(each.what)}, {escape(each.unit)}</h3>{svg.distribution(each)}"


def warnings(report: Report) -> Iterator[str]:
    """Yield the reasons why figures should not be cited."""
    if report.quick:
        yield "This run had the smallest sizes: it shows that the programs work, its figures say nothing."
    if figures.busy(report):
        yield "Other programs were running on the machine when this run, or one of its benchmarks, began."


def page(report: Report) -> str:
    """Return the whole HTML page."""
    parts = [f"<p class=warning>{escape(line)}</p>" for line in warnings(report)]
    if report.environment is not None:
        model = [("model", report.model or "a tiny random checkpoint")]
        parts.append(table((), figures.where(report.environment) + model))
    for result in report.results:
        parts += section(result)
    parts += [f"<p>{escape(name)} did not run: {escape(why)}.</p>" for name, why in report.left_out.items()]
    body = "\n".join(parts)
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><style>{STYLE}</style>'
    title = "<title>Benchmarks</title></head><body><h1>Benchmarks</h1>"
    return f'<!doctype html><html lang="en"><head>{head}{title}\n{body}\n</body></html>\n'
