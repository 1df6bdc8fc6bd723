"""The restart policy of a process that has ended, and the restart counts of replicas. Pure."""

from __future__ import annotations

from collections import deque

from vllm_omni_ext.config.schema import OmniConfig
from vllm_omni_ext.ids import ReplicaId

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


class RestartTotals:
    """Restarts of the replicas of each name since the deployment started.

    A replica reports its own count, which begins at 0 on another host: the counts of one name are added up.
    """

    def __init__(self) -> None:
        self.by_name: dict[ReplicaId, int] = {}
        self._reported: dict[ReplicaId, int] = {}

    def add(self, replica: ReplicaId, reported: int) -> int:
        """Add a replica's own count. Returns the total of its name."""
        before = self._reported.get(replica, 0)
        self._reported[replica] = reported
        more = reported - before if reported >= before else reported
        self.by_name[replica] = self.by_name.get(replica, 0) + more
        return self.by_name[replica]
