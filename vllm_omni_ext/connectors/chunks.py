"""Chunks: the one form in which results pass from stage to stage. A whole payload is one chunk with `last=True`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
ALL = 0  # a chunk size of "everything, once it is complete"


@dataclass(frozen=True, slots=True)
class Chunk(Generic[T]):
    """Consecutive items of one hand-over; `index` counts from 0, `last` marks the end."""

    index: int
    items: tuple[T, ...]
    last: bool


@dataclass(frozen=True, slots=True)
class ChunkSchedule:
    """Sizes of successive chunks; the final size repeats. `(ALL,)` is one chunk with everything.

    Example: (4, 25) sends 4 items first, then 25 at a time, and what is left at the end.
    """

    sizes: tuple[int, ...] = (ALL,)

    def __post_init__(self) -> None:
        if not self.sizes or any(size < 0 for size in self.sizes):
            raise ValueError(f"chunk sizes must be positive, or {ALL} for all; got {self.sizes}")

    def size(self, index: int) -> int:
        """Items in chunk `index`; ALL means until the end."""
        return self.sizes[min(index, len(self.sizes) - 1)]


class ChunkWriter(Generic[T]):
    """Cuts a stream of items into the chunks of a schedule."""

    def __init__(self, schedule: ChunkSchedule) -> None:
        self._schedule = schedule
        self._items: list[T] = []
        self._index = 0
        self._closed = False

    def write(self, items: Iterable[T], *, last: bool = False) -> Iterator[Chunk[T]]:
        """Take items and yield the chunks that are complete; with `last` everything left, marked as the end.

        Raises:
            ValueError: the stream has been closed already.
        """
        if self._closed:
            raise ValueError("write after the last chunk")
        self._items.extend(items)
        self._closed = last
        return iter(self._cut(last))

    def _cut(self, last: bool) -> list[Chunk[T]]:
        chunks = []
        while (size := self._schedule.size(self._index)) != ALL and len(self._items) > size:
            chunks.append(self._take(size, last=False))
        if last:
            chunks.append(self._take(len(self._items), last=True))
        elif size != ALL and len(self._items) == size:
            chunks.append(self._take(size, last=False))
        return chunks

    def _take(self, count: int, *, last: bool) -> Chunk[T]:
        chunk = Chunk(self._index, tuple(self._items[:count]), last)
        del self._items[:count]
        self._index += 1
        return chunk


class ChunkReader(Generic[T]):
    """Puts chunks together again and refuses gaps, repeats and chunks after the end."""

    def __init__(self) -> None:
        self._next = 0
        self.closed = False

    def read(self, chunk: Chunk[T]) -> tuple[T, ...]:
        """Return the chunk's items; ValueError if it is not the next one."""
        if self.closed or chunk.index != self._next:
            raise ValueError(f"chunk {chunk.index} came where {'the end' if self.closed else self._next} was due")
        self._next += 1
        self.closed = chunk.last
        return chunk.items
