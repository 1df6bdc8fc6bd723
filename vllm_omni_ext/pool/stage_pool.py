"""Routing within one stage: picks a replica and registers the request in one step. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from vllm_omni_ext.errors import StageUnavailable, UnknownMember
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.pool.policies import LeastQueueLength, Policy


class StagePool:
    """The live replicas of one stage and the requests bound to them.

    Args:
        changed: told how many requests are bound to a replica, whenever that changes.
    """

    def __init__(
        self,
        stage: str,
        replicas: Iterable[ReplicaId],
        policy: Policy | None = None,
        changed: Callable[[ReplicaId, int], None] = lambda replica, requests: None,
    ) -> None:
        self.stage = stage
        self._bound: dict[ReplicaId, set[str]] = {replica: set() for replica in replicas}
        self._where: dict[str, ReplicaId] = {}
        self._policy = policy or LeastQueueLength()
        self._changed = changed

    @property
    def replicas(self) -> tuple[ReplicaId, ...]:
        """The live replicas."""
        return tuple(self._bound)

    def admit(self, request_id: str) -> ReplicaId:
        """Bind a request to a replica; a request that is bound stays where it is.

        Raises:
            StageUnavailable: no replica is left.
        """
        if request_id in self._where:
            return self._where[request_id]
        if not self._bound:
            raise StageUnavailable(f"stage '{self.stage}' has no live replica")
        load = {replica: len(requests) for replica, requests in self._bound.items()}
        replica = self._policy.pick(self.replicas, load)
        self._bound[replica].add(request_id)
        self._where[request_id] = replica
        self._changed(replica, len(self._bound[replica]))
        return replica

    def replica_of(self, request_id: str) -> ReplicaId | None:
        """Where a request is bound, or None."""
        return self._where.get(request_id)

    def release(self, request_id: str) -> ReplicaId | None:
        """Unbind a request and say where it was; None if it was not bound."""
        replica = self._where.pop(request_id, None)
        if replica is not None:
            self._bound[replica].discard(request_id)
            self._changed(replica, len(self._bound[replica]))
        return replica

    def in_flight(self, replica: ReplicaId) -> int:
        """Requests bound to a replica; UnknownMember if it is not in the pool."""
        return len(self._requests(replica))

    def remove(self, replica: ReplicaId) -> tuple[str, ...]:
        """Take a replica out and return the requests that were bound to it; they are unbound."""
        lost = tuple(sorted(self._requests(replica)))
        del self._bound[replica]
        for request_id in lost:
            del self._where[request_id]
        return lost

    def _requests(self, replica: ReplicaId) -> set[str]:
        if replica not in self._bound:
            known = ", ".join(map(str, self._bound)) or "none"
            raise UnknownMember(f"no replica '{replica}' in the pool of '{self.stage}'; live: {known}")
        return self._bound[replica]
