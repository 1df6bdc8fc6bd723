"""What a replica says about how busy it is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Load:
    """Requests in a replica's scheduler, and how full its KV cache is (0 to 1).

    `report` is given by the coordinator: a load that is equal in this too is the same report, seen again.
    """

    waiting: int = 0
    running: int = 0
    kv_usage: float = 0.0
    report: int = 0

    @property
    def queue(self) -> int:
        """Requests it has, of all API servers."""
        return self.waiting + self.running


HALF_FULL = 0.5
"""KV usage from which a queue counts for more: below it, waiting requests start at once (as in vLLM's own balancer)."""

PRESSURE = 6.0
"""How much more, for each unit of KV usage above `HALF_FULL`: at a full cache a waiting request counts four times."""


def estimate(published: Load | None, at_publication: int, own: int, clients: int) -> float:
    """How loaded a replica is now, in requests.

    The model is vLLM's data-parallel balancer (`DPLBAsyncMPClient`): the last published queue, moved on by what this
    API server has sent and got back since, and never less than what it knows itself. The other API servers are taken
    to do as this one does.

    Args:
        published: the replica's last report; None if there is none that can be trusted.
        at_publication: requests of this API server that were bound to the replica when the report came.
        own: requests of this API server that are bound to it now.
        clients: number of API servers.
    """
    known = float(clients * own)
    if published is None:
        return known
    since = clients * (own - at_publication)
    waiting = max(0, published.waiting + since)
    pressure = PRESSURE * max(0.0, published.kv_usage - HALF_FULL)
    return max(known, published.queue + since) + waiting * pressure
