"""Allocator of byte ranges in a fixed block of memory. Pure: works on offsets, without the memory itself.

The allocator takes the first free span that fits, by address. Ranges can be freed in any order: with a ring buffer, a
request that is retained for a failover would block the memory of later requests. Low addresses are reused first, so
that the number of touched pages never exceeds the peak use, and cached pages are reused.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import chain
from operator import itemgetter

ALIGNMENT = 64
"""Bytes of a cache line, which is enough for every element type."""


def room(size: int) -> int:
    """Return `size` in bytes, rounded up to whole cache lines, at least one."""
    return max(1, -(-size // ALIGNMENT)) * ALIGNMENT


class Arena:
    """Allocates byte ranges within `capacity` bytes (rounded down to whole cache lines)."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity // ALIGNMENT * ALIGNMENT
        self._used: list[tuple[int, int]] = []  # [start, stop), ascending
        self.used_bytes = 0

    def take(self, size: int) -> int | None:
        """Allocate `size` bytes and return their offset; None if no free span fits. 0 bytes take one cache line."""
        size, start = room(size), 0
        for at, (begin, stop) in enumerate(chain(self._used, [(self.capacity, self.capacity)])):
            if begin - start >= size:
                self._used.insert(at, (start, start + size))
                self.used_bytes += size
                return start
            start = stop
        return None

    def free(self, offset: int) -> None:
        """Free an allocated range; KeyError if nothing is allocated at `offset`."""
        at = bisect_left(self._used, offset, key=itemgetter(0))
        if at == len(self._used) or self._used[at][0] != offset:
            raise KeyError(offset)
        start, stop = self._used.pop(at)
        self.used_bytes -= stop - start

    def __len__(self) -> int:
        return len(self._used)
