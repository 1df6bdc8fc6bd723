"""Times of the control plane, all derived from the heartbeat timeout."""

from __future__ import annotations

import math
from dataclasses import dataclass

from vllm_omni_ext.errors import ConfigError

SHORTEST_TIMEOUT_S = 1.0
BEATS_PER_TIMEOUT = 5
"""Heartbeats in one timeout: four may be lost or late."""

LONGEST_INTERVAL_S = 1.0
"""Heartbeats carry the load, so they are sent at least this often however long the timeout is."""

MISSED_BEATS = 3
"""A replica that missed this many heartbeats is avoided."""

KEPT_TIMEOUTS = 10
"""A silent replica keeps its name for this many timeouts, unless another needs it."""

PUBLISH_GAP_S = 0.1
"""Least time between two publications (vLLM's own coordinator publishes at this pace)."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Everything that is derived from the heartbeat timeout. All in seconds.

    Attributes:
        timeout_s: a replica that is silent for this time is down.
        drain_s: time that a leaving replica has to finish its requests.
    """

    timeout_s: float
    drain_s: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.timeout_s) and self.timeout_s >= SHORTEST_TIMEOUT_S):
            raise ConfigError(f"heartbeat timeout: must be at least {SHORTEST_TIMEOUT_S:g} s, got {self.timeout_s!r}")
        if not (math.isfinite(self.drain_s) and self.drain_s >= 0):
            raise ConfigError(f"drain time: must be a number of seconds >= 0, got {self.drain_s!r}")

    @property
    def interval_s(self) -> float:
        """Time between two heartbeats, and the longest time between two publications."""
        return min(self.timeout_s / BEATS_PER_TIMEOUT, LONGEST_INTERVAL_S)

    @property
    def suspect_s(self) -> float:
        """Silence after which a replica is avoided; shorter than the timeout."""
        return MISSED_BEATS * self.interval_s

    @property
    def forget_s(self) -> float:
        """Silence after which a replica's name is free."""
        return (1 + KEPT_TIMEOUTS) * self.timeout_s
