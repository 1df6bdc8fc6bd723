"""When a stage that is fed by another one may run. Pure: no vLLM, no torch, no clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Gate:
    """What one request has received so far.

    Attributes:
        rows_due: tensor rows the prompt needs before prefill may start.
        track: entries of the per-step track received (one is used by every decode step).
        closed: no further entries will come; every later step has its input.
        done: tokens at the end of the prompt that were sampled before the request came here.
    """

    rows_due: int = 0
    track: int = 0
    closed: bool = False
    done: int = 0

    @property
    def ready(self) -> bool:
        """Whether prefill may start."""
        return self.rows_due <= 0 and not self.starved(0)

    def starved(self, sampled: int) -> bool:
        """Whether the decode step after `sampled` sampled tokens still lacks its track entry."""
        return not self.closed and self.done + sampled > self.track

    def take(self, chunk: dict[str, Any], rows: int) -> None:
        """Account for one chunk: `track` entries, `last` marker, and `rows` tensor rows."""
        self.track += len(chunk.get("track", ()))
        self.closed = self.closed or bool(chunk.get("last"))
        self.rows_due -= rows

    @classmethod
    def of(cls, prompt: dict[str, Any]) -> Gate:
        """Open a gate from the payload a request is added with."""
        gate = cls(rows_due=int(prompt.get("rows", 0)), done=len(prompt.get("frames", ())))
        gate.take(prompt, 0)
        return gate
