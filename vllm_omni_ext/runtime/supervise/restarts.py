"""When to restart a replica that has ended. Pure."""

from __future__ import annotations

from collections import deque

from vllm_omni_ext.config.schema import OmniConfig

LONGEST_PAUSE_S = 30.0

DOUBLINGS = 64
"""More doublings than any pause needs to reach the longest one; bounds the exponent."""


class RestartPolicy:
    """Restart policy of one process, with a limit of failures per window.

    Args:
        limit: failures within the window after which the process is restarted; 0: no restarts.
        window_s: failures older than this are not counted, in seconds.
        backoff_s: pause before the first restart in a window; doubles with every further restart.
    """

    def __init__(self, *, limit: int, window_s: float, backoff_s: float) -> None:
        self._limit = limit
        self._window = window_s
        self._backoff = backoff_s
        self._failures: deque[float] = deque()
        self.count = 0
        """Restarts so far, including those outside the window."""

    def failed(self, at: float) -> float | None:
        """Record a failure. Returns the pause before the restart, in seconds; None: no restart.

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


def restarts_of(config: OmniConfig) -> RestartPolicy:
    """The restart policy of one process, with the limits of the configuration."""
    return RestartPolicy(
        limit=config.restart_limit, window_s=config.restart_window_s, backoff_s=config.restart_backoff_s
    )
