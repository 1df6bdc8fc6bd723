"""Chunks: the one form in which results pass from stage to stage. A whole payload is one chunk with `last=True`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    """How many items successive chunks wait for; the final size repeats. `(ALL,)` is one chunk with everything.

    Example: (4, 25) hands over once there are 4 items, then once there are 25 more, and what is left at the end.

    Attributes:
        rate: items a second that the consumer uses up once it has begun. A chunk then also goes out as soon as waiting
            for another item could make the consumer wait. 0: only the sizes count.
    """

    sizes: tuple[int, ...] = (ALL,)
    rate: float = 0.0

    def __post_init__(self) -> None:
        if not self.sizes or any(size < 0 for size in self.sizes):
            raise ValueError(f"chunk sizes must be positive, or {ALL} for all; got {self.sizes}")
        if self.rate < 0:
            raise ValueError(f"the rate must not be negative; got {self.rate}")

    @classmethod
    def of(cls, sizes: Sequence[int] | str, rate: float = 0.0) -> ChunkSchedule:
        """From what a configuration says: sizes, or the word for everything at once."""
        return cls((ALL,) if isinstance(sizes, str) else tuple(sizes), rate)

    def size(self, index: int) -> int:
        """Items that chunk `index` waits for; ALL means until the end."""
        return self.sizes[min(index, len(self.sizes) - 1)]

    def due(self, index: int, sent: int, elapsed: float | None) -> int:
        """As `size`, but never so many that the consumer would run dry while items come at its own rate or faster.

        Args:
            sent: items handed over in earlier chunks.
            elapsed: seconds since the consumer began; None: it has not.
        """
        size = self.size(index)
        if size == ALL or elapsed is None or not self.rate:
            return size
        # The last item sent does not count: the end of it may be of no use before the next one.
        return min(size, max(1, int(sent - 1 - elapsed * self.rate)))


class ChunkWriter(Generic[T]):
    """Cuts a stream of items into the chunks of a schedule."""

    def __init__(self, schedule: ChunkSchedule) -> None:
        self._schedule = schedule
        self._items: list[T] = []
        self._index = 0
        self._sent = 0
        self._closed = False

    def write(self, items: Iterable[T], *, last: bool = False, elapsed: float | None = None) -> Chunk[T] | None:
        """Take items; return the next chunk if it is due, with everything there is, else None.

        Args:
            last: nothing follows; what is left goes out, marked as the end.
            elapsed: seconds since the consumer began, for schedules with a rate.

        Raises:
            ValueError: the stream has been closed already.
        """
        if self._closed:
            raise ValueError("write after the last chunk")
        self._items.extend(items)
        self._closed = last
        due = self._schedule.due(self._index, self._sent, elapsed)
        if not last and (due == ALL or len(self._items) < due):
            return None
        chunk = Chunk(self._index, tuple(self._items), last)
        self._sent += len(self._items)
        self._items.clear()
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
