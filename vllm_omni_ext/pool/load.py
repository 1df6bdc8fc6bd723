"""Defines the load reports of replicas, and estimates a replica's current load from its last report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from vllm_omni_ext.encoding import Count


@dataclass(frozen=True, slots=True)
class Load:
    """Requests in a replica's scheduler, KV cache usage (0 to 1), and whether the scheduler is paused (`asleep`).

    The coordinator numbers the reports: two equal loads with an equal `report` are the same report.
    """

    waiting: Count = 0
    running: Count = 0
    kv_usage: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    report: Count = 0
    asleep: bool = False

    @property
    def queue(self) -> int:
        """Requests in the replica's scheduler, from all API servers."""
        return self.waiting + self.running

    def within_bounds(self) -> Load:
        """Return the load with each field clamped to the range that a message allows."""
        kv_usage = min(1.0, max(0.0, self.kv_usage))  # 0.0 also for NaN
        return Load(max(0, self.waiting), max(0, self.running), kv_usage, max(0, self.report), self.asleep)


HALF_FULL = 0.5
"""KV usage above which waiting requests weigh more in `estimate`. Below it, waiting requests are assumed to start at
once (as in vLLM's own balancer)."""

PRESSURE = 6.0
"""Extra weight per unit of KV usage above `HALF_FULL`: with a full cache a waiting request weighs 4 instead of 1."""


def estimate(published: Load | None, at_publication: int, own: int, clients: int) -> float:
    """Estimate the current load of a replica, in requests.

    The model is vLLM's data-parallel balancer (`DPLBAsyncMPClient`): the last published queue, plus the requests that
    this API server has sent since, minus those that have ended since, and never less than this API server's own
    requests. Each other API server is assumed to have as many requests in the replica as this one. With a full KV
    cache, waiting requests weigh more (`PRESSURE`).

    Args:
        published: the replica's last report; None if no recent report exists.
        at_publication: requests of this API server that were bound to the replica when the report arrived.
        own: requests of this API server that are bound to the replica now.
        clients: number of API servers.
    """
    known = float(clients * own)
    if published is None:
        return known
    since = clients * (own - at_publication)
    waiting = max(0, published.waiting + since)
    pressure = PRESSURE * max(0.0, published.kv_usage - HALF_FULL)
    return max(known, published.queue + since) + waiting * pressure
