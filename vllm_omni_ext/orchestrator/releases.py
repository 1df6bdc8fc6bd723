"""KV caches that nobody will fetch, until the replica that keeps them must have heard of it.

Only an engine of the stage that fetches can say so to the one that keeps them, and it may die before it has.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.orchestrator.split_requests import farewell
from vllm_omni_ext.pool.stage_pool import StagePool
from vllm_omni_ext.runtime.replica import Replica

MOST_KEPT = 4096
"""Of a target, and of those that wait for one; a source frees older ones by itself."""


@dataclass(frozen=True, slots=True)
class Held:
    """A KV cache of a prompt.

    Attributes:
        holder: the replica that keeps it.
        transfer: what a target is told about it.
    """

    holder: ReplicaId
    transfer: Mapping[str, Any]


@dataclass(slots=True)
class _Told:
    """What a target was told to have freed, and when that had been sent (monotonic seconds); before, infinite."""

    held: Held
    sent: float = math.inf


class Releases:
    """Of the KV caches that sources hold for one stage, the target."""

    def __init__(self, target: StagePool, replicas: Mapping[ReplicaId, Replica]) -> None:
        self._target = target
        self._replicas = replicas
        self._unclaimed: deque[Held] = deque(maxlen=MOST_KEPT)
        self._told: defaultdict[ReplicaId, deque[_Told]] = defaultdict(lambda: deque(maxlen=MOST_KEPT))
        self._numbers = itertools.count()

    async def let_go(self, held: Held) -> None:
        """Have a KV cache freed that nobody will fetch: now, or as soon as there is a target."""
        live = next((each for each in self._target.replicas if each in self._replicas), None)
        if live is None:
            self._unclaimed.append(held)
        else:
            request = farewell(f"unclaimed/{next(self._numbers)}", held.transfer)
            await self.tell(live, held, self._replicas[live].add(request))

    async def tell(self, target: ReplicaId, held: Held, telling: Awaitable[None]) -> None:
        """Send a target something whereupon it has a KV cache freed, once it has read it."""
        told = _Told(held)
        self._told[target].append(told)
        await telling
        told.sent = time.monotonic()

    def heard(self, target: ReplicaId, since: float) -> None:
        """A target has answered what it was sent at a time: so it has read what it was told before."""
        told = self._told[target]
        while told and told[0].sent < since:
            told.popleft()

    async def target_up(self) -> None:
        """There is a target that can be told."""
        while self._unclaimed:
            await self.let_go(self._unclaimed.popleft())

    async def target_down(self, target: ReplicaId) -> None:
        """A target is gone: others are told what it may not have read. To say it twice does no harm."""
        for told in self._told.pop(target, ()):
            await self.let_go(told.held)

    def holder_down(self, holder: ReplicaId) -> None:
        """A source is gone, and all it held."""
        self._unclaimed = deque((each for each in self._unclaimed if each.holder != holder), MOST_KEPT)
        for target, told in self._told.items():
            self._told[target] = deque((each for each in told if each.held.holder != holder), MOST_KEPT)
