"""Routing within one stage: chooses the replica of a request. Pure."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import chain, islice
from operator import itemgetter
from types import MappingProxyType
from typing import Literal, Protocol, TypeAlias

from vllm_omni_ext.config.checks import LB_POLICIES
from vllm_omni_ext.errors import ConfigError, StageUnavailable, UnknownMember
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.pool.load import Load, estimate

DEFAULT = LB_POLICIES[0]


class Policy(Protocol):
    """A load balancing policy: picks the replica of a new request."""

    def pick(self, load: Mapping[ReplicaId, float]) -> ReplicaId:
        """Return one of the keys of `load` (never empty); the values are estimated loads, in requests."""


class Random:
    """Picks a replica at random."""

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)

    def pick(self, load: Mapping[ReplicaId, float]) -> ReplicaId:
        return self._random.choice(tuple(load))


class RoundRobin:
    """Picks the replicas in turn, from position `start`, which is different in each API server."""

    def __init__(self, start: int = 0) -> None:
        self._turn = start

    def pick(self, load: Mapping[ReplicaId, float]) -> ReplicaId:
        at = self._turn % len(load)
        self._turn += 1
        return next(islice(load, at, None))


class LeastQueueLength:
    """Picks the least loaded replica. Replicas with equal load are picked in turn, from position `start`."""

    def __init__(self, start: int = 0) -> None:
        self._turn = start

    def pick(self, load: Mapping[ReplicaId, float]) -> ReplicaId:
        at = self._turn % len(load)
        self._turn += 1
        items = load.items()  # iterated without lookups: hashing a thousand names costs more than comparing them
        return min(chain(islice(items, at, None), islice(items, at)), key=itemgetter(1))[0]


POLICIES: Mapping[str, Callable[[int], Policy]] = dict(
    zip(LB_POLICIES, (LeastQueueLength, lambda start: Random(), RoundRobin), strict=True)
)
"""Policy name -> constructor, whose argument is the index of the API server that uses the policy."""


def policy(name: str = DEFAULT, start: int = 0) -> Policy:
    """Return a new load balancing policy, which selects the replica of each request.

    Args:
        name: its name in `POLICIES`; ConfigError for another one.
        start: index of the API server that uses the policy.
    """
    if name not in POLICIES:
        raise ConfigError(f"'{name}' is not a load balancing policy; use one of {', '.join(sorted(POLICIES))}")
    return POLICIES[name](start)


Why: TypeAlias = Literal["affinity", "policy", "only"]
"""Reason of a routing decision: an earlier request with the same session or media ("affinity"), the policy ("policy"),
or that only one replica was available ("only")."""

SLACK = 16.0
"""The replica that affinity prefers is not chosen if its load exceeds the lowest load by more than this many requests,
because a longer queue costs more than a cache hit saves."""


REMEMBERED = 8192
"""Most sessions and media items that one stage's pool keeps; the least recently used are dropped first."""

_DIGEST_BYTES = 16
"""Sessions and media keys are stored as digests of this size, because clients choose these texts, which may be long."""


class StagePool:
    """The live replicas of one stage, and the number of requests that each of them has.

    A replica is open (takes requests), avoided (takes requests only while no replica is open) or draining (takes
    none). A sleeping replica gets requests only while no other replica takes any; they wait until it is woken.

    Args:
        changed: called with the number of requests that a replica has, whenever that number changes.
        clients: number of API servers, each with a pool of its own over the same replicas.
        affinity: maps earlier sessions and media items to replicas.
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
        self._requests: dict[ReplicaId, int] = {}
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
        return tuple(self._requests)

    @property
    def takes_requests(self) -> bool:
        """Whether an awake replica is open or avoided, so that a new request need not wait."""
        return bool(self._awake(self._open) or self._awake(self._avoided))

    @property
    def open_replicas(self) -> tuple[ReplicaId, ...]:
        """The replicas that a new request may get: the open ones, or the avoided ones if no replica is open.

        Sleeping replicas are included only if no open or avoided replica is awake.
        """
        return tuple(self._candidates())

    def admit(
        self,
        *,
        session: str | None = None,
        media: Sequence[str] = (),
        among: Collection[ReplicaId] | None = None,
    ) -> ReplicaId:
        """Choose the replica of a new request. The caller must call `release` when the request has ended there.

        Args:
            session: requests of one session are sent to one replica, unless its load exceeds the least by `SLACK`.
            media: cache keys of the request's media items; a replica that has processed one of them is preferred.
            among: the replicas that may be chosen; None: all.

        Raises:
            StageUnavailable: no replica takes requests.
        """
        affinity = keys(session, media)
        replica, why = self._choose(affinity, among)
        self._affinity.remember(affinity, replica)
        self._count(replica, 1)
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
            state = "is draining: all its replicas are" if self._requests else "has no live replica"
            raise StageUnavailable(f"stage '{self.stage}' {state}")
        if len(candidates) == 1:
            return next(iter(candidates)), "only"
        for replica in self._affinity.places(affinity):
            if replica in candidates and candidates[replica] <= min(candidates.values()) + SLACK:
                return replica, "affinity"
        return self._policy.pick(MappingProxyType(candidates)), "policy"

    def _awake(self, candidates: Mapping[ReplicaId, float]) -> dict[ReplicaId, float]:
        return {replica: load for replica, load in candidates.items() if replica not in self._asleep}

    def release(self, replica: ReplicaId) -> None:
        """Record that a request has ended in a replica; UnknownMember if the replica is not in the pool."""
        self.in_flight(replica)
        self._count(replica, -1)

    def load(self, replica: ReplicaId) -> float:
        """Return the number of requests in a replica.

        For an open replica, that is the estimate for all API servers (see `load.estimate`); for any other replica, the
        number of this API server's requests, 0 if the replica is unknown.
        """
        return self._open.get(replica, float(self._requests.get(replica, 0)))

    def in_flight(self, replica: ReplicaId) -> int:
        """Return the number of this API server's requests in a replica; UnknownMember if it is not in the pool."""
        if replica not in self._requests:
            known = ", ".join(map(str, self._requests)) or "none"
            raise UnknownMember(f"no replica '{replica}' in the pool of '{self.stage}'; live: {known}")
        return self._requests[replica]

    def publish(self, loads: Mapping[ReplicaId, Load]) -> None:
        """Replace the load reports of all replicas. Reports of replicas that are not in `loads` are dropped.

        With each new report, the number of this API server's requests in the replica is stored (`at_publication` in
        `load.estimate`).

        Raises:
            UnknownMember: a replica is not in the pool; nothing is changed.
        """
        before, now = self._published, {r: (load, self.in_flight(r)) for r, load in loads.items()}
        for replica in before.keys() & now.keys():
            if before[replica][0] == now[replica][0]:
                now[replica] = before[replica]
        self._published = now
        for replica in before.keys() | now.keys():
            if before.get(replica) is not now.get(replica):
                self._weigh(replica)

    def add(self, replica: ReplicaId) -> None:
        """Open a replica that is new, avoided or draining.

        Raises:
            UnknownMember: the replica belongs to another stage.
        """
        if replica.stage != self.stage:
            raise UnknownMember(f"'{replica}' is no replica of stage '{self.stage}'")
        if replica in self._open:
            return
        self._requests.setdefault(replica, 0)
        self._avoided.pop(replica, None)
        self._open[replica] = 0.0
        self._weigh(replica)

    def avoid(self, replica: ReplicaId) -> None:
        """Send a replica no new requests while another one is open; UnknownMember if it is not in the pool."""
        self.drain(replica)
        self._avoided[replica] = 0.0
        self._weigh(replica)

    def drain(self, replica: ReplicaId) -> None:
        """Send a replica no new requests; its running requests continue. UnknownMember if it is not in the pool."""
        self.in_flight(replica)
        self._open.pop(replica, None)
        self._avoided.pop(replica, None)

    def mark_asleep(self, replica: ReplicaId) -> None:
        """Mark a replica as sleeping (vLLM's sleep mode); UnknownMember if it is not in the pool."""
        self.in_flight(replica)
        self._asleep.add(replica)

    def mark_awake(self, replica: ReplicaId) -> None:
        """Mark a replica as awake."""
        self._asleep.discard(replica)

    def is_asleep(self, replica: ReplicaId) -> bool:
        """Whether a replica is marked as sleeping."""
        return replica in self._asleep

    def remove(self, replica: ReplicaId) -> None:
        """Remove a replica and the count of its requests; UnknownMember if the replica is not in the pool."""
        self.drain(replica)
        self.mark_awake(replica)
        self._affinity.remove(replica)
        self._published.pop(replica, None)
        del self._requests[replica]

    def _count(self, replica: ReplicaId, more: int) -> None:
        self._requests[replica] += more
        self._weigh(replica)
        self._changed(replica, self._requests[replica])

    def _weigh(self, replica: ReplicaId) -> None:
        """Update the estimated load of a replica."""
        load, then = self._published.get(replica, (None, 0))
        for candidates in (self._open, self._avoided):
            if replica in candidates:
                candidates[replica] = estimate(load, then, self._requests[replica], self._clients)


class Affinity:
    """Maps the key of each session and media item (see `keys`) to the replica that got the last request with that key.

    Args:
        limit: most keys that are kept; the least recently used are dropped first.
    """

    def __init__(self, limit: int = REMEMBERED) -> None:
        self._limit = limit
        self._places: OrderedDict[bytes, ReplicaId] = OrderedDict()

    def __len__(self) -> int:
        return len(self._places)

    def places(self, keys: Sequence[bytes]) -> Iterator[ReplicaId]:
        """Yield the replicas to which the last requests with these keys were sent, in the order of the keys."""
        return (self._places[key] for key in keys if key in self._places)

    def remember(self, keys: Sequence[bytes], replica: ReplicaId) -> None:
        """Map these keys to `replica` from now on."""
        for key in keys:
            self._places[key] = replica
            self._places.move_to_end(key)
        while len(self._places) > self._limit:
            self._places.popitem(last=False)

    def remove(self, replica: ReplicaId) -> None:
        """Drop all keys of a replica that is removed, because its caches are lost."""
        for key in [key for key, place in self._places.items() if place == replica]:
            del self._places[key]


def keys(session: str | None, media: Sequence[str]) -> tuple[bytes, ...]:
    """Return the affinity keys of a request, the preferred first: its session, then its media items."""
    named = [] if session is None else [("session", session)]
    return tuple(_digest(kind, text) for kind, text in (*named, *(("media", item) for item in media)))


def _digest(kind: str, text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES, person=kind.encode()).digest()
