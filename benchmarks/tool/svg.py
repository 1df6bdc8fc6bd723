"""Plots as SVG text."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from html import escape

from benchmarks.tool.figures import MANY, number
from benchmarks.tool.results import Comparison, Span

WIDTH, LEFT, RIGHT, ROW = 760, 210, 70, 24
BARS = 60
COLORS = ("#2563a8", "#c2571a", "#2e7d4f", "#7b4aa0", "#8a6d1b")


def text(x: float, y: float, words: str, anchor: str = "start") -> str:
    """Return a text at a position."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def drawing(height: float, title: str, parts: Sequence[str]) -> str:
    """Return a whole plot; its title is for screen readers."""
    inside = "".join(parts)
    name = escape(title, quote=True)
    return f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{name}"><title>{name}</title>{inside}</svg>'


def place(value: float, most: float) -> float:
    """Return the position of a value on an axis that begins at zero."""
    return LEFT + (WIDTH - LEFT - RIGHT) * (value / most if most > 0 else 0.0)


def axis(y: float, most: float, unit: str) -> list[str]:
    """Return an axis from zero to the largest value."""
    line = f'<line x1="{LEFT}" y1="{y}" x2="{place(most, most):.1f}" y2="{y}" stroke="#999"/>'
    return [
        line,
        text(LEFT, y + 15, "0", "middle"),
        text(place(most, most), y + 15, f"{number(most)} {unit}", "middle"),
    ]


def timeline(title: str, spans: Sequence[Span]) -> str:
    """Return a plot with a row for each stage and a bar for each of its steps, in milliseconds."""
    stages = list(dict.fromkeys(span.stage for span in spans))
    most = max((span.end for span in spans), default=0.0)
    parts = [text(4, ROW * row + 16, stage) for row, stage in enumerate(stages)]
    for span in spans:
        row = stages.index(span.stage)
        start, end = place(span.start, most), place(span.end, most)
        hint = f"{span.stage}: {1e3 * span.start:.1f} to {1e3 * span.end:.1f} ms"
        parts.append(
            f'<rect x="{start:.1f}" y="{ROW * row + 4}" width="{max(end - start, 1):.1f}" height="{ROW - 8}" '
            f'fill="{COLORS[row % len(COLORS)]}"><title>{escape(hint)}</title></rect>'
        )
    bottom = ROW * len(stages) + 4
    return drawing(bottom + 22, title, parts + axis(bottom, 1e3 * most, "ms"))


def distribution(each: Comparison) -> str:
    """Return a plot of the samples of both sides, with lines at the medians."""
    rows = [(each.subject, each.samples), (each.baseline, each.baseline_samples)]
    most = max(value for _, values in rows for value in values)
    parts = []
    for row, (name, values) in enumerate(rows):
        y = ROW * row + ROW / 2
        parts.append(text(4, y + 4, name if len(name) < 34 else name[:32] + "…"))
        parts += marks(values, most, y, COLORS[row])
        parts.append(median_line(place(statistics.median(values), most), y, COLORS[row]))
    return drawing(ROW * 2 + 26, f"{each.what}, {each.unit}", parts + axis(ROW * 2 + 4, most, each.unit))


def marks(values: Sequence[float], most: float, y: float, color: str) -> list[str]:
    """Return a dot for each sample; from `MANY` samples on, the bars of a histogram.

    Args:
        most: the value at the right end of the axis.
        y: position of the row.
    """
    if len(values) < MANY:
        return [dot(place(value, most), y, color) for value in values]
    count = Counter(min(int(BARS * value / most), BARS - 1) if most > 0 else 0 for value in values)
    width, highest = (WIDTH - LEFT - RIGHT) / BARS, max(count.values())
    return [bar(LEFT + width * each, y + 10, width, 20 * n / highest, color) for each, n in sorted(count.items())]


def bar(x: float, y: float, width: float, height: float, color: str) -> str:
    """Return a bar of a histogram; its lower edge is at y."""
    where = f'x="{x:.1f}" y="{y - height:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect {where} fill="{color}" fill-opacity="0.4"/>'


def dot(x: float, y: float, color: str) -> str:
    """Return the dot of one sample."""
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}" fill-opacity="0.4"/>'


def median_line(x: float, y: float, color: str) -> str:
    """Return the vertical line that marks a median at x in the row y."""
    return f'<line x1="{x:.1f}" y1="{y - 10:.1f}" x2="{x:.1f}" y2="{y + 10:.1f}" stroke="{color}" stroke-width="2"/>'
