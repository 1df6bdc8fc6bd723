"""When a stage that is fed by another one may run. Pure: no vLLM, no torch, no clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm_omni_ext.wire.handoff import GIVEN


@dataclass(slots=True)
class Gate:
    """What one request has received so far.

    Attributes:
        rows_due: tensor rows the prompt needs before prefill may start.
        rows: of these, the first ones that can be taken.
        track: entries of the per-step track received (one is used by every decode step).
        closed: no further entries will come; every later step has its input.
        done: tokens at the end of the prompt that were sampled before the request came here.
    """

    rows_due: int = 0
    rows: int = 0
    track: int = 0
    closed: bool = False
    done: int = 0

    @property
    def ready(self) -> bool:
        """Whether prefill may start."""
        return self.rows >= self.rows_due and not self.starved(0)

    def starved(self, sampled: int) -> bool:
        """Whether the decode step after `sampled` sampled tokens still lacks its track entry."""
        return not self.closed and self.done + sampled > self.track

    def take(self, chunk: dict[str, Any]) -> None:
        """Account for one chunk: `track` entries, `last` marker, and how many rows there are by now."""
        self.track += len(chunk.get("track", ()))
        self.closed = self.closed or bool(chunk.get("last"))
        self.rows = max(self.rows, chunk.get(GIVEN, {}).get("count", 0))

    @classmethod
    def of(cls, prompt: dict[str, Any]) -> Gate:
        """Open a gate from the payload a request is added with."""
        gate = cls(rows_due=int(prompt.get("rows", 0)), done=len(prompt.get("frames", ())))
        gate.take(prompt)
        return gate
