"""KV caches that no replica will fetch, tracked until a request to free them was certainly sent to their source. Pure.

Only an engine of the target stage can send that request, and the engine may die before it has done so.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Callable

from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.orchestrator.messages import Effect, SendKVRelease
from vllm_omni_ext.orchestrator.state import KVCache
from vllm_omni_ext.pool.stage_pool import StagePool

MOST_KEPT = 4096
"""Limit per target, and for those that wait for a target; a source frees older KV caches by itself."""


class KVReleases:
    """Releases of the KV caches that sources store for one target stage.

    Messages to targets are numbered in the order in which they are sent.
    """

    def __init__(self, target: StagePool, out: Callable[[Effect], None]) -> None:
        self._target = target
        self._out = out
        self._unclaimed: deque[KVCache] = deque(maxlen=MOST_KEPT)
        self._requests: defaultdict[ReplicaId, deque[tuple[int, KVCache]]] = defaultdict(
            lambda: deque(maxlen=MOST_KEPT)
        )
        self._numbers = itertools.count()

    def number(self) -> int:
        """Return the number of a new message to a target."""
        return next(self._numbers)

    def release(self, kv: KVCache) -> None:
        """Have an unclaimed KV cache freed: at once, or as soon as a target is up."""
        live = next(iter(self._target.replicas), None)
        if live is None:
            self._unclaimed.append(kv)
        else:
            self._out(SendKVRelease(live, "", f"unclaimed/{self.add_request(live, kv)}", kv=kv.transfer))

    def add_request(self, target: ReplicaId, kv: KVCache) -> int:
        """Record that a message to a target releases a KV cache once it is read; return the message's number."""
        number = self.number()
        self._requests[target].append((number, kv))
        return number

    def answered(self, target: ReplicaId, number: int) -> None:
        """Record that a target answered the message with this number, and so has read all earlier messages."""
        requests = self._requests[target]
        while requests and requests[0][0] < number:
            requests.popleft()

    def target_up(self) -> None:
        """A target is up: send the pending releases."""
        while self._unclaimed:
            self.release(self._unclaimed.popleft())

    def target_lost(self, target: ReplicaId) -> None:
        """A target is lost: other targets get the releases that it may not have read. A second release does no harm."""
        for _, kv in self._requests.pop(target, ()):
            self.release(kv)

    def holder_lost(self, holder: ReplicaId) -> None:
        """A source is lost, and its KV caches with it."""
        self._unclaimed = deque((kv for kv in self._unclaimed if kv.holder != holder), MOST_KEPT)
        for target, requests in self._requests.items():
            self._requests[target] = deque((each for each in requests if each[1].holder != holder), MOST_KEPT)
