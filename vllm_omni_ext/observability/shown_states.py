"""Selects the states of replicas that are written to gauges. Pure."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

AGAIN_S = 0.25
"""How long a busy replica's state is not written again, in seconds."""


class ShownStates:
    """The last state of each replica that this process has written to gauges.

    An unchanged state is written again only if other processes set the same gauges: each receives the states after some
    of the steps. An idle replica's state is written at once, because no later step might correct another process's
    value. A busy replica's state is written at most every `AGAIN_S`.

    Args:
        alone: no other process sets the gauges.
        clock: monotonic clock, seconds.
    """

    def __init__(self, *, alone: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._alone = alone
        self._clock = clock
        self._written: dict[Hashable, tuple[object, float]] = {}

    def due(self, replica: Hashable, state: object, *, busy: bool) -> bool:
        """Return whether a replica's state is to be written now; if so, record it as written."""
        known, since = self._written.get(replica, (None, 0.0))
        now = 0.0 if self._alone else self._clock()
        if known == state and (self._alone or (busy and now - since < AGAIN_S)):
            return False
        self._written[replica] = state, now
        return True

    def forget(self, replica: Hashable) -> None:
        """The gauges of a replica were, or will be, set to something else."""
        self._written.pop(replica, None)
