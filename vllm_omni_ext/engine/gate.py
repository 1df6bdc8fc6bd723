"""How far a stage that is fed by another one may run. Pure: no vLLM, no torch, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm_omni_ext.wire.handoff import GIVEN


@dataclass(slots=True)
class Gate:
    """What one request has received so far.

    Attributes:
        size: positions of its prompt; those of tokens sampled before it came here are not counted.
        text: of these, how many are known, from the first on.
        spans: ranges [start, stop) of positions whose tensor rows are handed over, ascending.
        rows: how many of the rows can be taken, in the order of the positions.
        track: entries received of the track; each position after the prompt uses one.
        closed: no further entries will come; every later position has its input.
    """

    size: int = 0
    text: int = 0
    spans: Sequence[Sequence[int]] = ()
    rows: int = 0
    track: int = 0
    closed: bool = False

    def limit(self) -> int | None:
        """How many positions can be computed, prompt and sampled tokens; None: all there will be."""
        left = self.rows
        for start, stop in self.spans:
            if left < stop - start:
                return min(self.text, start + left)
            left -= stop - start
        if self.text < self.size:
            return self.text
        return None if self.closed else self.size + self.track

    def take(self, chunk: dict[str, Any]) -> None:
        """Account for one chunk: `text` of the prompt, `track` entries, `last` marker, and how many rows there are."""
        self.text += len(chunk.get("text", ()))
        self.track += len(chunk.get("track", ()))
        self.closed = self.closed or bool(chunk.get("last"))
        self.rows = max(self.rows, chunk.get(GIVEN, {}).get("count", 0))

    @classmethod
    def of(cls, prompt: dict[str, Any], length: int) -> Gate:
        """Open a gate from the payload a request is added with, and the length of its prompt as the engine counts."""
        gate = cls(size=length - len(prompt.get("frames", ())), spans=prompt.get("rows", ()))
        gate.take(prompt)
        if "text" not in prompt:  # the engine knows the ids itself
            gate.text = gate.size
        return gate
