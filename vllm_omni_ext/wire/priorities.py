"""vLLM priorities of the parts of a stream: by the priority of the request, then by the time at which the part is due.

A part is one engine request of a stream (see `plugins.flow.Submit`). vLLM's scheduler has one number for both values,
and schedules the lowest number first.
"""

from __future__ import annotations

MOST = 1 << 18
"""Highest priority of a request; the lowest is `-MOST`."""

_LATER_MS = 1 << 44
"""Milliseconds that a priority of 1 adds to the due time of a part: more than any Unix time."""


def of_part(priority: int, due_ms: int) -> int:
    """Return vLLM's priority of a part.

    Args:
        priority: priority of the client's request to which the part belongs.
        due_ms: time at which the part is due, in Unix milliseconds.
    """
    return priority * _LATER_MS + due_ms


def of_request(priority: int) -> int:
    """Return a request's priority from vLLM's priority of the request or of one of its parts."""
    return priority if abs(priority) <= MOST else priority // _LATER_MS
