"""Which replica a new request goes to. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from itertools import chain, islice
from operator import itemgetter
from typing import Protocol

from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.ids import ReplicaId

DEFAULT = "least-queue-length"


class Policy(Protocol):
    """Picks one of several replicas."""

    def pick(self, load: Mapping[ReplicaId, float]) -> ReplicaId:
        """Return one of the keys of `load` (never empty); the values are requests, estimated."""


class Random:
    """Any replica.

    Args:
        seed: the same seed picks the same replicas.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)

    def pick(self, load: Mapping[ReplicaId, float]) -> ReplicaId:
        """Return any."""
        return self._random.choice(tuple(load))


class RoundRobin:
    """Each replica in turn.

    Args:
        start: whose turn is first; API servers that start at different places do not all hit the same one.
    """

    def __init__(self, start: int = 0) -> None:
        self._turn = start

    def pick(self, load: Mapping[ReplicaId, float]) -> ReplicaId:
        """Return the next."""
        at = self._turn % len(load)
        self._turn += 1
        return next(islice(load, at, None))


class LeastQueueLength:
    """The least loaded replica; equals take turns, so that idle replicas are all used.

    Args:
        start: whose turn is first among equals.
    """

    def __init__(self, start: int = 0) -> None:
        self._turn = start

    def pick(self, load: Mapping[ReplicaId, float]) -> ReplicaId:
        """Return the one with the lowest load."""
        at = self._turn % len(load)
        self._turn += 1
        items = load.items()  # iterated, never looked up: hashing a thousand names costs more than comparing them
        return min(chain(islice(items, at, None), islice(items, at)), key=itemgetter(1))[0]


POLICIES: Mapping[str, Callable[[int], Policy]] = {
    "random": lambda start: Random(),
    "round-robin": RoundRobin,
    "least-queue-length": LeastQueueLength,
}
"""How to make each policy; the argument is the number of the API server that will use it."""


def policy(name: str = DEFAULT, start: int = 0) -> Policy:
    """A new policy by name; ConfigError names those there are."""
    if name not in POLICIES:
        raise ConfigError(f"'{name}' is not a load balancing policy; use one of {', '.join(sorted(POLICIES))}")
    return POLICIES[name](start)
