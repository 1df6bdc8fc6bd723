"""Writes the results of a load test as a table and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import msgspec
from rich.console import Group
from rich.table import Table

from vllm_omni_ext.loadtest.answers import Answer
from vllm_omni_ext.loadtest.figures import LATE_CLIENT_S, NOTICED_S, Distribution, Figures

COLUMNS = ("mean", "p50", "p90", "p95", "p99", "most")
ROWS: Mapping[str, tuple[str, float]] = {
    "session_ready_s": ("session ready, ms", 1e3),
    "first_text_s": ("first text, ms", 1e3),
    "first_sound_s": ("first sound, ms", 1e3),
    "whole_s": ("whole answer, s", 1.0),
    "sound_s": ("sound of an answer, s", 1.0),
    "real_time_factor": ("real-time factor", 1.0),
    "silence_s": ("silence of an answer, ms", 1e3),
    "longest_gap_s": ("longest gap of an answer, ms", 1e3),
    "client_lag_s": ("lag of this client, ms", 1e3),
}
"""(name in the table, factor from the measure's value to the unit of the table) by measure, in the table's order."""


def table(found: Figures, title: str) -> Group:
    """Return a `rich` table of the measures, followed by lines with the other figures."""
    rows = Table(title=title)
    rows.add_column("")
    for name in COLUMNS:
        rows.add_column(name, justify="right")
    for measure, (name, factor) in ROWS.items():
        if (each := found.measures.get(measure)) is not None:
            rows.add_row(name, *_cells(each, factor))
    return Group(*([rows] if found.answered else []), *_lines(found))


def _cells(each: Distribution, factor: float) -> Iterator[str]:
    for name in COLUMNS:
        value = factor * getattr(each, name)
        yield f"{value:.0f}" if factor > 1 else f"{value:.3f}"


def _lines(found: Figures) -> Iterator[str]:
    yield f"answered: {found.answered} of {found.requests} in {found.duration_s:.2f} s"
    yield f"most at once: {found.most_at_once}"
    yield f"throughput: {found.answers_per_s:.2f} answers/s, {found.sound_s_per_s:.1f} s of sound a second"
    yield f"gaps over {1e3 * NOTICED_S:.0f} ms: {found.gaps}, in {found.answers_with_gaps} answers"
    for kind, count in found.failures.items():
        yield f"failed: {count} ({kind})"
    if found.client_was_late:
        yield f"this client began requests more than {1e3 * LATE_CLIENT_S:.0f} ms late: its figures are too large"


def as_json(settings: Mapping[str, Any], found: Figures, answers: Sequence[Answer]) -> bytes:
    """Return the JSON file with the settings, the figures, and the times of every answer in seconds."""
    document = {"settings": settings, "figures": asdict(found), "answers": [asdict(answer) for answer in answers]}
    return msgspec.json.format(msgspec.json.encode(document), indent=1)
