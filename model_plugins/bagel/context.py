"""Contexts (the KV cache of one sequence): keys and values of every layer, and the next position.

A `Context` never changes. A longer context refers to the shorter context that it continues, so that the branches of a
request share their common prefix. A context without references is freed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Context:
    """Keys and values of a sequence.

    Attributes:
        length: number of tokens.
        position: RoPE position of the next token. All tokens of an image have one position.
        before: the context that this context continues; None for the empty context.
        layers: keys and values of the added tokens, `[tokens, kv_heads, head_dim]` each, by layer.
    """

    length: int = 0
    position: int = 0
    before: Context | None = None
    layers: tuple[tuple[Tensor, Tensor], ...] = ()

    def extended(self, layers: Sequence[tuple[Tensor, Tensor]], positions: int) -> Context:
        """Return a context that continues this context with new tokens.

        Args:
            layers: keys and values of the new tokens, by layer.
            positions: number of RoPE positions of the new tokens.
        """
        added = layers[0][0].shape[0]
        return Context(self.length + added, self.position + positions, self, tuple(layers))

    def pieces(self, layer: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield keys and values of a layer in order, each `[tokens, kv_heads, head_dim]`, after RoPE."""
        if self.before is not None:
            yield from self.before.pieces(layer)
            yield self.layers[layer]


EMPTY = Context()
"""The context without tokens."""


class GrowingContext:
    """A context of a text that is being generated: single tokens are appended to a `Context`.

    Args:
        before: context of the prompt.
        capacity: number of tokens for which memory is allocated at first; it doubles when it is full.
    """

    def __init__(self, before: Context, capacity: int = 64) -> None:
        self._before = before
        self._capacity = capacity
        self._added = 0
        self._layers: list[tuple[Tensor, Tensor]] = []

    @property
    def length(self) -> int:
        return self._before.length + self._added

    @property
    def position(self) -> int:
        return self._before.position + self._added

    def pieces(self, layer: int) -> Iterator[tuple[Tensor, Tensor]]:
        yield from self._before.pieces(layer)
        if self._added:
            keys, values = self._layers[layer]
            yield keys[: self._added], values[: self._added]

    def append(self, layers: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Add one token with these keys and values, `[1, kv_heads, head_dim]` each, by layer."""
        if not self._layers:
            self._layers = [(self._room(key), self._room(value)) for key, value in layers]
        elif self._added == self._capacity:
            self._capacity *= 2
            self._layers = [(self._grown(key), self._grown(value)) for key, value in self._layers]
        for (keys, values), (key, value) in zip(self._layers, layers, strict=True):
            keys[self._added] = key[0]
            values[self._added] = value[0]
        self._added += 1

    def _room(self, like: Tensor) -> Tensor:
        return like.new_empty(self._capacity, *like.shape[1:])

    def _grown(self, old: Tensor) -> Tensor:
        new = self._room(old)
        new[: self._added] = old[: self._added]
        return new


Seen = Context | GrowingContext
"""Types of contexts to which a row (one sequence of a forward pass) can attend."""
