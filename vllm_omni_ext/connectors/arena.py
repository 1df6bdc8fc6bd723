"""Allocator of byte ranges in a fixed block of memory. Pure: works on offsets, without the memory itself.

First fit by address. Ranges can be freed in any order: with a ring buffer, a request that is retained for a failover
would block the memory of later requests. Low addresses are reused first, so that the number of touched pages never
exceeds the peak use, and cached pages are reused.
"""

from __future__ import annotations

from bisect import bisect_left

ALIGNMENT = 64
"""Bytes of a cache line, which is enough for every element type."""


def room(size: int) -> int:
    """`size` rounded up to whole cache lines, at least one."""
    return max(1, -(-size // ALIGNMENT)) * ALIGNMENT


class Arena:
    """Allocates ranges of `capacity` bytes (rounded down to whole cache lines)."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity // ALIGNMENT * ALIGNMENT
        self._starts = [0]  # of the free spans, ascending; spans are never adjacent
        self._stops = [self.capacity]
        self._used: dict[int, int] = {}
        self.used_bytes = 0

    def take(self, size: int) -> int | None:
        """Allocate `size` bytes and return their offset; None without a free span. 0 bytes take one cache line."""
        size = room(size)
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
        """Free an allocated range; KeyError if nothing is allocated at `offset`."""
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
