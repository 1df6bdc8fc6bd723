"""How far a stage that is fed by another one may run. Pure: no vLLM, no torch, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Gate:
    """What one request has received so far.

    Attributes:
        size: positions of its prompt, those of tokens sampled before it came here not counted.
        text: of these, how many are known, from the first on.
        spans: ranges [start, stop) of positions whose tensor rows are handed over, ascending.
        rows: how many of the rows have come, in the order of the positions.
        track: entries of the per-step track received (one is used by every decode step).
        closed: no further entries will come; every later step has its input.
        done: tokens at the end of the prompt that were sampled before the request came here.
    """

    size: int = 0
    text: int = 0
    spans: Sequence[Sequence[int]] = ()
    rows: int = 0
    track: int = 0
    closed: bool = False
    done: int = 0

    def limit(self) -> int | None:
        """How many positions of the prompt can be computed; None: all of them."""
        left = self.rows
        for start, stop in self.spans:
            if left < stop - start:
                return min(self.text, start + left)
            left -= stop - start
        if self.text < self.size:
            return self.text
        return self.size if self.starved(0) else None

    def starved(self, sampled: int) -> bool:
        """Whether the decode step after `sampled` sampled tokens still lacks its track entry."""
        return not self.closed and self.done + sampled > self.track

    def take(self, chunk: dict[str, Any], rows: int) -> None:
        """Account for one chunk: `text` of the prompt, `track` entries, `last` marker, and `rows` tensor rows."""
        self.text += len(chunk.get("text", ()))
        self.track += len(chunk.get("track", ()))
        self.closed = self.closed or bool(chunk.get("last"))
        self.rows += rows

    @classmethod
    def of(cls, prompt: dict[str, Any], length: int) -> Gate:
        """Open a gate from the payload a request is added with, and the length of its prompt as the engine counts."""
        done = len(prompt.get("frames", ()))
        gate = cls(size=length - done, spans=prompt.get("rows", ()), done=done)
        gate.take(prompt, 0)
        if "text" not in prompt:  # the engine knows the ids itself
            gate.text = gate.size
        return gate
