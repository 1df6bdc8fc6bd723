"""Load balancing policies: choose the replica of a new request. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from itertools import chain, islice
from operator import itemgetter
from typing import Protocol

from vllm_omni_ext.config.checks import LB_POLICIES
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.ids import ReplicaId

DEFAULT = LB_POLICIES[0]


class Policy(Protocol):
    """Picks one of several replicas."""

    def pick(self, load: Mapping[ReplicaId, float]) -> ReplicaId:
        """Return one of the keys of `load` (never empty); the values are estimated loads, in requests."""


class Random:
    """Picks a replica at random.

    Args:
        seed: seed of the random generator.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)

    def pick(self, load: Mapping[ReplicaId, float]) -> ReplicaId:
        """Return a random replica."""
        return self._random.choice(tuple(load))


class RoundRobin:
    """Picks each replica in turn.

    Args:
        start: position of the first replica; with different positions, API servers do not all pick the same replica.
    """

    def __init__(self, start: int = 0) -> None:
        self._turn = start

    def pick(self, load: Mapping[ReplicaId, float]) -> ReplicaId:
        """Return the next replica."""
        at = self._turn % len(load)
        self._turn += 1
        return next(islice(load, at, None))


class LeastQueueLength:
    """Picks the least loaded replica; equally loaded ones take turns, so that all idle replicas are used.

    Args:
        start: position of the first replica among equally loaded ones.
    """

    def __init__(self, start: int = 0) -> None:
        self._turn = start

    def pick(self, load: Mapping[ReplicaId, float]) -> ReplicaId:
        """Return the replica with the lowest load."""
        at = self._turn % len(load)
        self._turn += 1
        items = load.items()  # iterated without lookups: hashing a thousand names costs more than comparing them
        return min(chain(islice(items, at, None), islice(items, at)), key=itemgetter(1))[0]


POLICIES: Mapping[str, Callable[[int], Policy]] = dict(
    zip(LB_POLICIES, (LeastQueueLength, lambda start: Random(), RoundRobin), strict=True)
)
"""Constructor of each policy; its argument is the index of the API server that will use the policy."""


def policy(name: str = DEFAULT, start: int = 0) -> Policy:
    """Make a policy by name; ConfigError for an unknown name."""
    if name not in POLICIES:
        raise ConfigError(f"'{name}' is not a load balancing policy; use one of {', '.join(sorted(POLICIES))}")
    return POLICIES[name](start)
