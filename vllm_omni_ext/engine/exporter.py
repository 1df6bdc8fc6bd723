"""Extracts from each step's output the hidden states that a stage exports, i.e. sends to another stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_omni_ext.engine.input_provider import Span
from vllm_omni_ext.wire.stage_input import OPEN_END


@dataclass(frozen=True, slots=True)
class ExportedSlice:
    """The hidden states [count, width] that one request exports in one step.

    Attributes:
        first: index of row 0 among all hidden states that the request exports.
        last: no further hidden states must follow: the request's ranges are complete, or the last one has no end
            (`OPEN_END`).
    """

    first: int
    hidden_states: torch.Tensor
    last: bool


@dataclass(slots=True)
class _Export:
    ranges: tuple[tuple[int, int], ...]  # positions, ascending, [start, stop)
    done: int = 0  # positions before this one were exported already

    def before(self, position: int) -> int:
        """Return how many exported positions lie before `position`."""
        return sum(max(0, min(stop, position) - start) for start, stop in self.ranges)

    @property
    def whole(self) -> bool:
        """Whether all ranges were exported up to their end; also True if the last range has no end (`OPEN_END`)."""
        stop = self.ranges[-1][1]
        return stop == OPEN_END or self.done >= stop

    def due(self, span: Span) -> list[tuple[int, int]]:
        """Return the ranges of the span's positions that are to be exported and were not exported yet."""
        begin, end = max(span.start, self.done), span.start + span.count
        clipped = [(max(start, begin), min(stop, end)) for start, stop in self.ranges]
        return [(start, stop) for start, stop in clipped if start < stop]


class Exporter:
    """Tracks which positions of each request a worker still has to export.

    Each position is exported once. A position that is computed again after a preemption has the same hidden states and
    is not exported again.

    Attributes:
        steps: number of steps with exports, for tests and metrics.
    """

    def __init__(self) -> None:
        self._open: dict[str, _Export] = {}
        self.steps = 0

    def add(self, req_id: str, ranges: Sequence[tuple[int, int]], exported: int = 0) -> None:
        """Register a request that exports the hidden states of positions [start, stop); without ranges do nothing.

        A request that is added again after a preemption keeps its progress.

        Args:
            exported: number of leading positions that another replica exports.
        """
        requested = tuple(sorted(ranges))
        export = self._open.get(req_id)
        if requested and (export is None or export.ranges != requested):
            self._open[req_id] = _Export(requested, exported)

    def drop(self, req_id: str) -> bool:
        """Remove a request; return whether it was known (most requests export nothing)."""
        return self._open.pop(req_id, None) is not None

    def due(self, spans: Sequence[Span]) -> bool:
        """Return whether any of the spans contains a position that is to be exported and was not exported yet."""
        return any(span.req_id in self._open and self._open[span.req_id].due(span) for span in spans)

    def restore(self, req_id: str, until: int) -> tuple[int, bool] | None:
        """Count the positions before `until` as exported, because their hidden states are read from kept blocks.

        Returns:
            (index of the first hidden state that was not exported before this call, among all that the request exports;
            whether the request exports none from position `until` on); None if nothing before `until` was missing.
        """
        export = self._open[req_id]
        first = export.before(export.done)
        export.done = max(export.done, until)
        return None if first == export.before(until) else (first, export.whole)

    def rows(self, req_id: str, start: int, stop: int) -> slice:
        """Return the indices of positions [start, stop) among all hidden states that a request exports."""
        export = self._open[req_id]
        return slice(export.before(start), export.before(stop))

    def cut(self, spans: Sequence[Span], hidden: torch.Tensor) -> dict[str, ExportedSlice]:
        """Return, by request id, the hidden states that a step exports.

        Args:
            spans: the positions that the step has computed, in batch order.
            hidden: hidden states [tokens, width] of all these positions, in the same order.
        """
        self.steps += 1
        found: dict[str, ExportedSlice] = {}
        base = 0
        for span in spans:
            export = self._open.get(span.req_id)
            if export is not None and (ranges := export.due(span)):
                offset = base - span.start
                picks = [hidden[offset + start : offset + stop] for start, stop in ranges]
                export.done = span.start + span.count
                found[span.req_id] = ExportedSlice(export.before(ranges[0][0]), torch.cat(picks), export.whole)
            base += span.count
        return found
