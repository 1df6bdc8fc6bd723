"""Splits the items that a stage generates for the next stage into chunks, by a schedule of chunk sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
ALL = 0  # chunk size: all items in one chunk, when the stream has ended


@dataclass(frozen=True, slots=True)
class Chunk(Generic[T]):
    """Consecutive items of one stream on an edge; `index` counts from 0, `last` marks the end."""

    index: int
    items: tuple[T, ...]
    last: bool


@dataclass(frozen=True, slots=True)
class ChunkSchedule:
    """Sizes of successive chunks, in items; the last size repeats. `(ALL,)` is one chunk with all items.

    Example: (4, 25) sends a chunk after 4 items, then one after every 25 more, and the rest at the end.

    Attributes:
        rate: items per second that the consumer uses once it has begun. A smaller chunk is then sent if the consumer
            could run out of items before the chunk is full. 0: only the sizes count.
        streamed: the consumer uses items while later ones are generated. False: it uses none before the last one, so
            every chunk has the last size.
    """

    sizes: tuple[int, ...] = (ALL,)
    rate: float = 0.0
    streamed: bool = True

    def __post_init__(self) -> None:
        if not self.sizes or any(size < 0 for size in self.sizes):
            raise ValueError(f"chunk sizes must be positive, or {ALL} for all; got {self.sizes}")
        if self.rate < 0:
            raise ValueError(f"the rate must not be negative; got {self.rate}")

    @classmethod
    def of(cls, sizes: Sequence[int] | str, rate: float = 0.0, *, streamed: bool = True) -> ChunkSchedule:
        """Return the schedule for a configured value: a sequence of sizes, or a string for one chunk with all items."""
        return cls((ALL,) if isinstance(sizes, str) else tuple(sizes), rate, streamed)

    def size(self, index: int) -> int:
        """Return the size of chunk `index`, in items; ALL: the chunk contains all items up to the end."""
        return self.sizes[min(index, len(self.sizes) - 1) if self.streamed else -1]

    def due(self, index: int, sent: int, elapsed: float | None) -> int:
        """Return the size of chunk `index`, limited so that a consumer never waits if items arrive at `rate` or faster.

        Args:
            sent: items sent in earlier chunks.
            elapsed: seconds since the consumer began; None: it has not begun.
        """
        size = self.size(index)
        if size == ALL or elapsed is None or not self.rate or not self.streamed:
            return size
        # The last item sent does not count: to use all of it, the consumer may need the item after it.
        return min(size, max(1, int(sent - 1 - elapsed * self.rate)))


class ChunkCounter:
    """Counts the items of a stream, and reports when a chunk of a `ChunkSchedule` is complete; it stores no items.

    Args:
        divide: a chunk has at most the items of its size; further items are pending until `add` is called again. False:
            a chunk has all pending items.

    Attributes:
        chunks: number of complete chunks so far.
    """

    def __init__(self, schedule: ChunkSchedule, *, divide: bool = False) -> None:
        self._schedule = schedule
        self._divide = divide
        self._pending = 0
        self.chunks = 0
        self._sent = 0
        self._closed = False

    def add(self, items: int, *, last: bool = False, elapsed: float | None = None, least: int = 1) -> int | None:
        """Count new items; return the number of items in the next chunk if it is complete, else None.

        Args:
            items: number of new items.
            last: no item follows; the pending items are the last chunk.
            elapsed: seconds since the consumer began, for schedules with a rate.
            least: minimum number of items in the chunk, regardless of the schedule, unless it is the last.

        Raises:
            ValueError: the stream has been closed already.
        """
        if self._closed:
            raise ValueError("items after the last chunk")
        self._closed = last
        chunk = self._pending = self._pending + items
        if not last:
            due = self._schedule.due(self.chunks, self._sent, elapsed)
            if due == ALL or chunk < due or chunk < least:
                return None
            if self._divide:
                chunk = min(chunk, max(least, self._schedule.size(self.chunks)))
        self._sent += chunk
        self._pending -= chunk
        self.chunks += 1
        return chunk


class ChunkWriter(Generic[T]):
    """Splits a stream of items into the chunks of a schedule."""

    def __init__(self, schedule: ChunkSchedule) -> None:
        self._counter = ChunkCounter(schedule)
        self._items: list[T] = []

    @property
    def pending(self) -> int:
        """Number of items that no chunk has yet."""
        return len(self._items)

    def write(
        self, items: Sequence[T], *, last: bool = False, elapsed: float | None = None, least: int = 1
    ) -> Chunk[T] | None:
        """Add items; return the next chunk, with all items since the previous one, or None if it is not complete.

        Arguments and errors are those of `ChunkCounter.add`.
        """
        count = self._counter.add(len(items), last=last, elapsed=elapsed, least=least)
        self._items.extend(items)
        if count is None:
            return None
        chunk = Chunk(self._counter.chunks - 1, tuple(self._items), last)
        self._items.clear()
        return chunk
