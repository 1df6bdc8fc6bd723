"""Which bytes of a fixed piece of memory are free. Pure: knows offsets, not memory.

First fit by address. Pieces are freed in any order, since a request that is kept for a replica to come must not hold up
what was put after it, as it would in a queue; and low addresses are used again first, so that no more pages of the
memory are ever touched than were needed at once, and the warm ones are reused.
"""

from __future__ import annotations

from bisect import bisect_left

ALIGNMENT = 64
"""Bytes: a cache line, and more than any element needs."""


def aligned(size: int) -> int:
    """`size` rounded up to whole cache lines."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class Arena:
    """Allocates pieces of `capacity` bytes (rounded down to whole lines)."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity // ALIGNMENT * ALIGNMENT
        self._starts = [0]  # of free spans, ascending; never adjacent
        self._stops = [self.capacity]
        self._used: dict[int, int] = {}
        self.used_bytes = 0

    def take(self, size: int) -> int | None:
        """Offset of `size` free bytes; None if there is no span of that length. An empty piece takes a line."""
        size = max(aligned(size), ALIGNMENT)
        spans = enumerate(zip(self._starts, self._stops, strict=True))
        found = next(((at, start, stop) for at, (start, stop) in spans if stop - start >= size), None)
        if found is None:
            return None
        at, start, stop = found
        self._used[start] = size
        self.used_bytes += size
        if stop - start == size:
            del self._starts[at], self._stops[at]
        else:
            self._starts[at] = start + size
        return start

    def free(self, offset: int) -> None:
        """Give a piece back; KeyError if it is none."""
        size = self._used.pop(offset)
        self.used_bytes -= size
        at = bisect_left(self._starts, offset)
        joins_before = at > 0 and self._stops[at - 1] == offset
        joins_after = at < len(self._starts) and self._starts[at] == offset + size
        if joins_before and joins_after:
            self._stops[at - 1] = self._stops[at]
            del self._starts[at], self._stops[at]
        elif joins_before:
            self._stops[at - 1] = offset + size
        elif joins_after:
            self._starts[at] = offset
        else:
            self._starts.insert(at, offset)
            self._stops.insert(at, offset + size)

    def __len__(self) -> int:
        return len(self._used)
