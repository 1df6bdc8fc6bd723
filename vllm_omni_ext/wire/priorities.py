"""The priority of a part of a stream: its request's priority, then the time at which the part is due.

vLLM's scheduler has one number for both, and schedules the lowest first.
"""

from __future__ import annotations

MOST = 1 << 18
"""Highest priority of a request; the lowest is `-MOST`."""

_LATER_MS = 1 << 44
"""Milliseconds that a priority of 1 adds to the due time of a part: more than any Unix time."""


def of_part(priority: int, due_ms: int) -> int:
    """Return vLLM's priority of a part.

    Args:
        priority: of its request.
        due_ms: Unix time, milliseconds.
    """
    return priority * _LATER_MS + due_ms


def of_request(priority: int) -> int:
    """Return a request's priority from vLLM's priority of the request or of one of its parts."""
    return priority if abs(priority) <= MOST else priority // _LATER_MS
