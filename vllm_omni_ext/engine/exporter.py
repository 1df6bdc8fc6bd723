"""Which hidden rows a stage owes the next one in a step. Does nothing for requests that export nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_omni_ext.engine.feeder import Span
from vllm_omni_ext.wire.rows import pack


@dataclass(frozen=True, slots=True)
class _Export:
    ranges: tuple[tuple[int, int], ...]  # prompt positions, ascending, [start, stop)

    def before(self, position: int) -> int:
        """How many exported rows lie before `position`."""
        return sum(max(0, min(stop, position) - start) for start, stop in self.ranges if start < position)

    @property
    def end(self) -> int:
        return self.ranges[-1][1]


class Exporter:
    """Tracks the requests that owe rows. `steps` counts the steps in which it had work (for tests and metrics)."""

    def __init__(self) -> None:
        self._open: dict[str, _Export] = {}
        self.steps = 0

    def add(self, req_id: str, ranges: Sequence[tuple[int, int]]) -> None:
        """Register a request; no ranges, nothing to do."""
        if ranges:
            self._open[req_id] = _Export(tuple(sorted(ranges)))

    def drop(self, req_id: str) -> None:
        """Forget a request (unknown ids are ignored: most requests export nothing)."""
        self._open.pop(req_id, None)

    def due(self, spans: Sequence[Span]) -> bool:
        """Whether any of the spans holds a row to export."""
        if not self._open:
            return False
        return any(
            (export := self._open.get(span.req_id)) is not None
            and export.before(span.start + span.count) > export.before(span.start)
            for span in spans
        )

    def cut(self, spans: Sequence[Span], hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        """Packed rows by request from the step's `hidden` [tokens, width] (spans in batch order)."""
        self.steps += 1
        packed: dict[str, torch.Tensor] = {}
        base = 0
        for span in spans:
            export = self._open.get(span.req_id)
            if export is not None:
                picks = [
                    hidden[
                        base + max(start, span.start) - span.start : base
                        + min(stop, span.start + span.count)
                        - span.start
                    ]
                    for start, stop in export.ranges
                    if start < span.start + span.count and stop > span.start
                ]
                if picks:
                    packed[span.req_id] = pack(export.before(span.start), torch.cat(picks))
            base += span.count
        return packed
