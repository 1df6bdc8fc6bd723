"""When a replica that has ended is started again. Pure."""

from __future__ import annotations

from collections import deque

LONGEST_PAUSE_S = 30.0

DOUBLINGS = 64
"""More than any pause needs to become the longest one; a power of many thousands would be no number."""


class Restarts:
    """One replica's failures.

    Args:
        limit: failures within the window that are answered with a restart; 0: none is.
        window_s: a failure older than this is forgiven, in seconds.
        backoff_s: pause before the first restart in a window; it doubles with every further one.
    """

    def __init__(self, *, limit: int, window_s: float, backoff_s: float) -> None:
        self._limit = limit
        self._window = window_s
        self._backoff = backoff_s
        self._failures: deque[float] = deque()
        self.count = 0
        """Restarts so far, forgiven ones included."""

    def failed(self, at: float) -> float | None:
        """Note a failure and say after which pause to start again, in seconds; None: no more.

        Args:
            at: monotonic seconds.
        """
        while self._failures and self._failures[0] <= at - self._window:
            self._failures.popleft()
        if len(self._failures) >= self._limit:
            return None
        pause = min(LONGEST_PAUSE_S, self._backoff * 2.0 ** min(len(self._failures), DOUBLINGS))
        self._failures.append(at)
        self.count += 1
        return pause
