"""Computes how many positions of a request can be computed while its input arrives in chunks.

Pure: no vLLM, no torch, no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm_omni_ext.wire.stage_input import StageInput


@dataclass(slots=True)
class InputProgress:
    """The input that one request has received so far.

    Attributes:
        size: number of prompt positions, without tokens that were sampled before the request moved to this engine.
        received: number of leading prompt positions whose input has arrived.
        spans: ranges [start, stop) of positions whose input is hidden states of another stage, ascending.
        hidden_states: number of these hidden states that were read or are lost, in the order of the positions.
        step_inputs: number of positions after the prompt whose input has arrived.
        complete: no chunk follows; every later position has its input.
        cached: number of leading positions that the prefix cache has, for which no hidden states are needed.
        announced: number of hidden states that were announced.
        held: (`announced` at its arrival, step inputs, whether no chunk follows) of each chunk whose step inputs do not
            count yet. They count when the hidden states that were announced by then have been read, because the input
            of a position after the prompt may need these hidden states.
    """

    size: int = 0
    received: int = 0
    spans: Sequence[tuple[int, int]] = ()
    hidden_states: int = 0
    step_inputs: int = 0
    complete: bool = False
    cached: int = 0
    announced: int = 0
    held: list[tuple[int, int, bool]] = field(default_factory=list)

    def limit(self) -> int | None:
        """Return how many positions (prompt and sampled tokens) can be computed; None: no limit."""
        return self._limit(self.cached)

    def continues(self, cached: int) -> bool:
        """Return whether the position after the first `cached` ones can be computed if the prefix cache has these."""
        limit = self._limit(cached)
        return limit is None or limit > cached

    def _limit(self, cached: int) -> int | None:
        left = self.hidden_states
        for start, stop in self.spans:
            if (missing := max(start + left, cached)) < stop:
                return min(self.received, missing)
            left = max(0, left - (stop - start))
        if self.received < self.size:
            return self.received
        return None if self.complete else self.size + self.step_inputs

    def add(self, chunk: StageInput) -> None:
        """Record the input of one chunk. Hidden states that the chunk only announces are recorded by `arrived`."""
        self.received = self.size if chunk.prompt_positions is None else self.received + chunk.prompt_positions
        if chunk.hidden_states is not None:
            self.announced = max(self.announced, chunk.hidden_states.count)
        self.held.append((self.announced, chunk.step_inputs, chunk.last))
        self._release()

    def arrived(self, count: int) -> None:
        """Record that the first `count` hidden states were read or are lost."""
        self.hidden_states = max(self.hidden_states, count)  # after a failover, the new source may be behind
        self._release()

    def _release(self) -> None:
        while self.held and self.held[0][0] <= self.hidden_states:
            _, step_inputs, last = self.held.pop(0)
            self.step_inputs += step_inputs
            self.complete = self.complete or last

    @classmethod
    def of(cls, opening: StageInput, length: int) -> InputProgress:
        """Return the progress of a new request.

        Args:
            opening: the input that came with the request.
            length: number of prompt tokens in the engine, including `opening.done` generated ones.
        """
        progress = cls(size=length - opening.done, spans=opening.hidden_spans)
        progress.add(opening)
        return progress
