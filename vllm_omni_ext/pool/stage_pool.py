"""Routing within one stage: picks a replica and registers the request in one step. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, TypeAlias

from vllm_omni_ext.errors import StageUnavailable, UnknownMember
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.pool.affinity import Affinity, keys
from vllm_omni_ext.pool.load import Load, estimate
from vllm_omni_ext.pool.policies import LeastQueueLength, Policy

Why: TypeAlias = Literal["affinity", "policy", "only"]
"""Reason of a routing decision: an earlier request, the policy, or that only one replica was available."""

SLACK = 16.0
"""Affinity is ignored if the replica has this many requests more than the least loaded one: a cache hit is worth a
short queue, not a long one."""


class StagePool:
    """The live replicas of one stage and the requests bound to them.

    A replica is open (takes requests), avoided (takes requests only while no replica is open) or draining (takes
    none). A sleeping replica gets requests only while no other replica takes any; they wait until it is woken.

    Args:
        changed: called with the number of requests bound to a replica, whenever that number changes.
        clients: number of API servers, each with a pool of its own over the same replicas.
        affinity: the replicas of earlier sessions and media items.
        decided: called for every routing decision, with its reason.
    """

    def __init__(
        self,
        stage: str,
        replicas: Iterable[ReplicaId],
        policy: Policy | None = None,
        changed: Callable[[ReplicaId, int], None] = lambda replica, requests: None,
        *,
        clients: int = 1,
        affinity: Affinity | None = None,
        decided: Callable[[ReplicaId, Why], None] = lambda replica, why: None,
    ) -> None:
        self.stage = stage
        self._bound: dict[ReplicaId, set[str]] = {}
        self._where: dict[str, ReplicaId] = {}
        self._open: dict[ReplicaId, float] = {}
        self._avoided: dict[ReplicaId, float] = {}
        self._asleep: set[ReplicaId] = set()
        self._published: dict[ReplicaId, tuple[Load, int]] = {}
        self._policy = policy or LeastQueueLength()
        self._changed = changed
        self._clients = clients
        self._affinity = Affinity() if affinity is None else affinity
        self._decided = decided
        for replica in replicas:
            self.add(replica)

    @property
    def replicas(self) -> tuple[ReplicaId, ...]:
        """The live replicas, draining ones included."""
        return tuple(self._bound)

    @property
    def takes_requests(self) -> bool:
        """Whether an awake replica takes requests, so that a new request need not wait."""
        return bool(self._awake(self._open) or self._awake(self._avoided))

    @property
    def open_replicas(self) -> tuple[ReplicaId, ...]:
        """The replicas that a new request may get: open ones or, if there are none, avoided ones."""
        return tuple(self._candidates())

    def admit(
        self,
        request_id: str,
        *,
        session: str | None = None,
        media: Sequence[str] = (),
        among: Collection[ReplicaId] | None = None,
    ) -> ReplicaId:
        """Bind a request to a replica; a request that is bound already keeps its replica.

        Args:
            session: requests of one session go to one replica, as far as its load allows.
            media: cache keys of the request's media items; a replica that has processed one of them is preferred.
            among: only these replicas may get it; None: all.

        Raises:
            StageUnavailable: no replica takes requests.
        """
        if request_id in self._where:
            return self._where[request_id]
        affinity = keys(session, media)
        replica, why = self._choose(affinity, among)
        self._affinity.remember(affinity, replica)
        self._bound[replica].add(request_id)
        self._where[request_id] = replica
        self._recount(replica)
        self._decided(replica, why)
        return replica

    def _candidates(self) -> dict[ReplicaId, float]:
        candidates = self._open or self._avoided
        if self._asleep:
            candidates = self._awake(self._open) or self._awake(self._avoided) or candidates
        return candidates

    def _choose(self, affinity: Sequence[bytes], among: Collection[ReplicaId] | None) -> tuple[ReplicaId, Why]:
        candidates = self._candidates()
        if among is not None:
            candidates = {replica: load for replica, load in candidates.items() if replica in among}
        if not candidates:
            state = "is draining: all its replicas are" if self._bound else "has no live replica"
            raise StageUnavailable(f"stage '{self.stage}' {state}")
        if len(candidates) == 1:
            return next(iter(candidates)), "only"
        for replica in self._affinity.places(affinity):
            if replica in candidates and candidates[replica] <= min(candidates.values()) + SLACK:
                return replica, "affinity"
        return self._policy.pick(MappingProxyType(candidates)), "policy"

    def _awake(self, candidates: Mapping[ReplicaId, float]) -> dict[ReplicaId, float]:
        return {replica: load for replica, load in candidates.items() if replica not in self._asleep}

    def replica_of(self, request_id: str) -> ReplicaId | None:
        """The replica of a request; None if the request is not bound."""
        return self._where.get(request_id)

    def release(self, request_id: str) -> ReplicaId | None:
        """Unbind a request and return its replica; None if it was not bound."""
        replica = self._where.pop(request_id, None)
        if replica is not None:
            self._bound[replica].discard(request_id)
            self._recount(replica)
        return replica

    def load(self, replica: ReplicaId) -> float:
        """Estimated requests in a replica, of all API servers; of one that takes no new ones, those bound to it."""
        return self._open.get(replica, float(len(self._bound.get(replica, ()))))

    def in_flight(self, replica: ReplicaId) -> int:
        """Requests bound to a replica; UnknownMember if it is not in the pool."""
        return len(self._requests(replica))

    def publish(self, loads: Mapping[ReplicaId, Load]) -> None:
        """Replace the replicas' last reports; a replica that is not in `loads` has no report any more.

        The first time a report is seen, the requests bound to the replica are recorded with it; see `estimate`.

        Raises:
            UnknownMember: a replica is not in the pool; nothing is changed.
        """
        before, now = self._published, {r: (load, len(self._requests(r))) for r, load in loads.items()}
        for replica in before.keys() & now.keys():
            if before[replica][0] == now[replica][0]:
                now[replica] = before[replica]
        self._published = now
        for replica in before.keys() | now.keys():
            if before.get(replica) is not now.get(replica):
                self._weigh(replica)

    def add(self, replica: ReplicaId) -> None:
        """Open a replica: a new, avoided or draining one.

        Raises:
            UnknownMember: the replica belongs to another stage.
        """
        if replica.stage != self.stage:
            raise UnknownMember(f"'{replica}' is no replica of stage '{self.stage}'")
        if replica in self._open:
            return
        self._bound.setdefault(replica, set())
        self._avoided.pop(replica, None)
        self._open[replica] = 0.0
        self._weigh(replica)

    def avoid(self, replica: ReplicaId) -> None:
        """Send a replica no new requests while other replicas are open; UnknownMember if it is not in the pool."""
        self.drain(replica)
        self._avoided[replica] = 0.0
        self._weigh(replica)

    def drain(self, replica: ReplicaId) -> None:
        """Send a replica no new requests; bound requests stay. UnknownMember if it is not in the pool."""
        self._requests(replica)
        self._open.pop(replica, None)
        self._avoided.pop(replica, None)

    def rest(self, replica: ReplicaId) -> None:
        """Mark a replica as sleeping; UnknownMember if it is not in the pool."""
        self._requests(replica)
        self._asleep.add(replica)

    def rouse(self, replica: ReplicaId) -> None:
        """Mark a replica as awake."""
        self._asleep.discard(replica)

    def is_asleep(self, replica: ReplicaId) -> bool:
        """Whether a replica is marked as sleeping."""
        return replica in self._asleep

    def remove(self, replica: ReplicaId) -> tuple[str, ...]:
        """Remove a replica and return the requests that were bound to it; they are unbound."""
        lost = tuple(sorted(self._requests(replica)))
        self.drain(replica)
        self.rouse(replica)
        self._affinity.forget(replica)
        self._published.pop(replica, None)
        del self._bound[replica]
        for request_id in lost:
            del self._where[request_id]
        return lost

    def _recount(self, replica: ReplicaId) -> None:
        self._weigh(replica)
        self._changed(replica, len(self._bound[replica]))

    def _weigh(self, replica: ReplicaId) -> None:
        """Update the estimated load of a replica."""
        load, then = self._published.get(replica, (None, 0))
        for candidates in (self._open, self._avoided):
            if replica in candidates:
                candidates[replica] = estimate(load, then, len(self._bound[replica]), self._clients)

    def _requests(self, replica: ReplicaId) -> set[str]:
        if replica not in self._bound:
            known = ", ".join(map(str, self._bound)) or "none"
            raise UnknownMember(f"no replica '{replica}' in the pool of '{self.stage}'; live: {known}")
        return self._bound[replica]
