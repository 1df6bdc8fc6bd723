"""Allocator of byte ranges in a fixed block of memory. Pure: works on offsets, without the memory itself.

The allocator takes the first free span that fits, by address. Ranges can be freed in any order: with a ring buffer, a
request that is retained for a failover would block the memory of later requests. Low addresses are reused first, so
that the number of touched pages never exceeds the peak use, and cached pages are reused.
"""

from __future__ import annotations

from bisect import bisect_left

ALIGNMENT = 64
"""Bytes of a cache line, which is enough for every element type."""


def room(size: int) -> int:
    """Return `size` in bytes, rounded up to whole cache lines, at least one."""
    return max(1, -(-size // ALIGNMENT)) * ALIGNMENT


class Arena:
    """Allocates byte ranges within `capacity` bytes (rounded down to whole cache lines)."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity // ALIGNMENT * ALIGNMENT
        self.used_bytes = 0
        self._used: dict[int, int] = {}
        """Size by offset."""
        self._free: list[tuple[int, int]] = [(0, self.capacity)]
        """Free spans [start, stop), ascending; no two touch. There are few, as the lowest ones are used first."""

    def take(self, size: int) -> int | None:
        """Allocate `size` bytes and return their offset; None if no free span fits. 0 bytes take one cache line."""
        size = room(size)
        for at, (start, stop) in enumerate(self._free):
            if stop - start >= size:
                self._free[at : at + 1] = [(start + size, stop)] if stop - start > size else []
                self._used[start] = size
                self.used_bytes += size
                return start
        return None

    def free(self, offset: int) -> None:
        """Free an allocated range; KeyError if nothing is allocated at `offset`."""
        size = self._used.pop(offset)
        self.used_bytes -= size
        start, stop = offset, offset + size
        at = end = bisect_left(self._free, (start, stop))
        if at and self._free[at - 1][1] == start:
            at -= 1
            start = self._free[at][0]
        if end < len(self._free) and self._free[end][0] == stop:
            stop = self._free[end][1]
            end += 1
        self._free[at:end] = [(start, stop)]

    def __len__(self) -> int:
        return len(self._used)
