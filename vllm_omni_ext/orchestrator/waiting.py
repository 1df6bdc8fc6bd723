"""Requests that a stage cannot take now, because none of its replicas is up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from vllm_omni_ext.errors import StageUnavailable
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.pool.stage_pool import StagePool


class Waiting:
    """Who waits for which stage, for how long, and whether there is anything to wait for.

    Args:
        limit_s: longest wait, in seconds.
        joinable: whether replicas nobody has announced may come (from other hosts).
        expired: called with stage and request when a wait has become too long.
        changed: told how many requests wait for a stage, whenever that changes.
    """

    def __init__(
        self,
        limit_s: float,
        *,
        joinable: bool,
        expired: Callable[[str, str], None],
        changed: Callable[[str, int], None] = lambda stage, requests: None,
    ) -> None:
        self.limit_s = limit_s
        self._joinable = joinable
        self._expired = expired
        self._changed = changed
        self._announced: set[ReplicaId] = set()
        self._timers: dict[tuple[str, str], asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        return len(self._timers)

    def waits(self, request_id: str) -> bool:
        """Whether a request waits for any stage."""
        return any(waiting == request_id for _, waiting in self._timers)

    def announce(self, replica: ReplicaId) -> None:
        """A replica is being started."""
        self._announced.add(replica)

    def settle(self, replica: ReplicaId) -> None:
        """A replica is up, or will never be."""
        self._announced.discard(replica)

    def hopeful(self, stage: str) -> bool:
        """Whether a replica of the stage may come."""
        return self._joinable or any(replica.stage == stage for replica in self._announced)

    def admit(
        self, pool: StagePool, request_id: str, *, session: str | None = None, media: Sequence[str] = ()
    ) -> ReplicaId | None:
        """Bind a request to a replica; None: it waits until there is one, and is then to be opened anew.

        Raises:
            StageUnavailable: there is none, and none will come.
        """
        try:
            return pool.admit(request_id, session=session, media=media)
        except StageUnavailable:
            if not self.hopeful(pool.stage):
                raise
        self.add(pool.stage, request_id)
        return None

    def add(self, stage: str, request_id: str) -> None:
        """A request waits from now on; one that waits already goes on."""
        key = (stage, request_id)
        if key not in self._timers:
            self._timers[key] = asyncio.get_running_loop().call_later(self.limit_s, self._too_long, key)
            self._recount(stage)

    def _too_long(self, key: tuple[str, str]) -> None:
        if self._timers.pop(key, None) is not None:
            self._recount(key[0])
            self._expired(*key)

    def take(self, stage: str) -> list[str]:
        """The requests that wait for a stage, in the order they came; they wait no longer."""
        taken = [key for key in self._timers if key[0] == stage]
        for key in taken:
            self._timers.pop(key).cancel()
        if taken:
            self._recount(stage)
        return [request_id for _, request_id in taken]

    def forget(self, request_id: str, *stages: str) -> None:
        """A request needs these stages no more."""
        for stage in stages:
            timer = self._timers.pop((stage, request_id), None)
            if timer is not None:
                timer.cancel()
                self._recount(stage)

    def _recount(self, stage: str) -> None:
        self._changed(stage, sum(key[0] == stage for key in self._timers))
