"""Which hidden rows a stage owes the next one in a step. Does nothing for requests that export nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_omni_ext.engine.feeder import Span


@dataclass(frozen=True, slots=True)
class Cut:
    """Rows [count, width] of one request; `first` is the index of the first among all that it exports."""

    first: int
    rows: torch.Tensor
    last: bool


@dataclass(slots=True)
class _Export:
    ranges: tuple[tuple[int, int], ...]  # prompt positions, ascending, [start, stop)
    done: int = 0  # positions before this one were cut already

    def before(self, position: int) -> int:
        """How many exported rows lie before `position`."""
        return sum(max(0, min(stop, position) - start) for start, stop in self.ranges if start < position)

    @property
    def end(self) -> int:
        return self.ranges[-1][1]


class Exporter:
    """Tracks the requests that owe rows. `steps` counts the steps in which it had work (for tests and metrics).

    Each row is cut once: what is computed again after a preemption is the same and has been handed over.
    """

    def __init__(self) -> None:
        self._open: dict[str, _Export] = {}
        self.steps = 0

    def add(self, req_id: str, ranges: Sequence[tuple[int, int]]) -> None:
        """Register a request; no ranges, nothing to do. One that comes again after a preemption stays as it is."""
        wanted = tuple(sorted(ranges))
        known = self._open.get(req_id)
        if wanted and (known is None or known.ranges != wanted):
            self._open[req_id] = _Export(wanted)

    def drop(self, req_id: str) -> None:
        """Forget a request (unknown ids are ignored: most requests export nothing)."""
        self._open.pop(req_id, None)

    def due(self, spans: Sequence[Span]) -> bool:
        """Whether any of the spans holds a row to export."""
        if not self._open:
            return False
        return any((export := self._open.get(span.req_id)) is not None and _owed(export, span) for span in spans)

    def cut(self, spans: Sequence[Span], hidden: torch.Tensor) -> dict[str, Cut]:
        """What the step owes, by request, from its `hidden` [tokens, width] (spans in batch order)."""
        self.steps += 1
        found: dict[str, Cut] = {}
        base = 0
        for span in spans:
            export = self._open.get(span.req_id)
            if export is not None and _owed(export, span):
                begin, end = max(span.start, export.done), span.start + span.count
                picks = [
                    hidden[base + max(start, begin) - span.start : base + min(stop, end) - span.start]
                    for start, stop in export.ranges
                    if start < end and stop > begin
                ]
                found[span.req_id] = Cut(export.before(begin), torch.cat(picks), last=end >= export.end)
                export.done = end
            base += span.count
        return found


def _owed(export: _Export, span: Span) -> bool:
    end = span.start + span.count
    return end > export.done and export.before(end) > export.before(max(span.start, export.done))
