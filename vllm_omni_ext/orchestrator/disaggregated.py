"""Text requests on an edge over which KV caches go: one stage computes the prompt, the next one writes the answer.

Every attempt has an engine request of its own in each of the two, with an id that is never used again: whatever an
earlier attempt still says is recognised.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason

from vllm_omni_ext.disaggregation.parameters import decode_transfer
from vllm_omni_ext.errors import OmniError, RequestFailed
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.observability.observer import Observer
from vllm_omni_ext.orchestrator.releases import Held, Releases
from vllm_omni_ext.orchestrator.split_requests import can_be_split, decode_request, prefill_request
from vllm_omni_ext.pool.stage_pool import StagePool
from vllm_omni_ext.runtime.replica import Replica


@dataclass(frozen=True, slots=True)
class Pair:
    """A replica that computed prompts for another one.

    Attributes:
        handed: how many requests since the start.
        fetching: how many whose first token has not come yet.
    """

    source: ReplicaId
    target: ReplicaId
    handed: int
    fetching: int


class TextWay(Protocol):
    """How text requests get through the stages that answer them."""

    stages: tuple[str, ...]
    """All of them; the last one answers."""

    def __len__(self) -> int:
        """Attempts that are known."""

    def needs(self, stage: str) -> bool:
        """Whether requests cannot do without a stage, of whatever kind."""

    def begin(self, request: EngineCoreRequest) -> tuple[str, EngineCoreRequest]:
        """A new attempt: which stage is given the request first, and in which form."""

    def engine_ids(self, stage: str, requests: tuple[str, ...]) -> tuple[str, ...]:
        """What the engines of a stage call these requests."""

    async def current(self, replica: ReplicaId, output: EngineCoreOutput) -> bool:
        """Give an output the id of its request; False if its attempt has ended."""

    async def passed(self, replica: ReplicaId, output: EngineCoreOutput, payload: Any) -> bool:
        """Take an output and what its tensor says; True if it was for the way alone, and is no news behind it."""

    async def forget(self, request_id: str) -> None:
        """The request has ended, or begins anew."""

    async def replica_up(self, replica: ReplicaId) -> None:
        """A replica takes requests."""

    async def replica_down(self, replica: ReplicaId) -> list[str]:
        """A replica is gone: requests that are bound elsewhere and need to begin anew all the same."""

    def pairs(self) -> list[Pair]:
        """Which replicas have handed KV caches to which."""


class OneStage:
    """The stage that answers computes its prompts too."""

    def __init__(self, stage: str) -> None:
        self.stages: tuple[str, ...] = (stage,)

    def __len__(self) -> int:
        return 0

    def needs(self, stage: str) -> bool:
        """Every one."""
        return True

    def begin(self, request: EngineCoreRequest) -> tuple[str, EngineCoreRequest]:
        """As it is."""
        return self.stages[-1], request

    def engine_ids(self, stage: str, requests: tuple[str, ...]) -> tuple[str, ...]:
        """As everybody does."""
        return requests

    async def current(self, replica: ReplicaId, output: EngineCoreOutput) -> bool:
        """Always; they have their requests' ids."""
        return True

    async def passed(self, replica: ReplicaId, output: EngineCoreOutput, payload: Any) -> bool:
        """Never."""
        return False

    async def forget(self, request_id: str) -> None:
        """Nothing is known."""

    async def replica_up(self, replica: ReplicaId) -> None:
        """Nothing waits for it here."""

    async def replica_down(self, replica: ReplicaId) -> list[str]:
        """None."""
        return []

    def pairs(self) -> list[Pair]:
        """None."""
        return []


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a relay needs of those it works for.

    Attributes:
        admit: binds a request to a replica of a stage; None: it waits, and is begun anew later.
        rows: takes what a replica of the source says about rows of a request's prompt.
        failed: ends a request that cannot go on.
    """

    admit: Callable[[str, EngineCoreRequest], ReplicaId | None]
    rows: Callable[[ReplicaId, str, Any], Awaitable[None]]
    failed: Callable[[str, str, OmniError], Awaitable[None]]


@dataclass
class _Attempt:
    """One way of a request through both stages.

    Attributes:
        request: what is asked of both together.
        engine_id: what the engine that has it now calls it.
        held: what the target may still have to fetch; None once it has said anything.
        handed: when the target was given it (monotonic seconds); None before, and once the target has said anything.
        target: whom it was given.
    """

    request: EngineCoreRequest
    engine_id: str
    held: Held | None = None
    handed: float | None = None
    target: ReplicaId | None = None


class Relay:
    """The stage `source` computes prompts, `target` answers. While `source` has no replica, `target` does both."""

    def __init__(
        self,
        source: str,
        target: str,
        pools: Mapping[str, StagePool],
        replicas: Mapping[ReplicaId, Replica],
        observer: Observer,
        ask: Asked,
    ) -> None:
        self.stages: tuple[str, ...] = (source, target)
        self._source, self._target = source, target
        self._pools = pools
        self._replicas = replicas
        self._observer = observer
        self._ask = ask
        self._attempts: dict[str, _Attempt] = {}
        self._owners: dict[str, str] = {}
        self._handed: Counter[tuple[ReplicaId, ReplicaId]] = Counter()
        self._releases = Releases(pools[target], replicas)
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._attempts)

    def needs(self, stage: str) -> bool:
        """All but the source: the target can compute prompts itself."""
        return stage != self._source

    def begin(self, request: EngineCoreRequest) -> tuple[str, EngineCoreRequest]:
        """A new attempt; the one before must have been forgotten."""
        if self._pools[self._source].takes_requests and can_be_split(request):
            engine_id = self._name(request.request_id, "p")
            self._attempts[request.request_id] = _Attempt(request, engine_id)
            return self._source, prefill_request(request, engine_id)
        return self._target, self._for_target(_Attempt(request, ""))

    def engine_ids(self, stage: str, requests: tuple[str, ...]) -> tuple[str, ...]:
        """What the engines of a stage call these requests."""
        if stage not in self.stages:
            return requests
        return tuple(self._attempts[each].engine_id for each in requests if each in self._attempts)

    async def current(self, replica: ReplicaId, output: EngineCoreOutput) -> bool:
        """Give an output the id of its request; False if its attempt has ended.

        The source may have computed a prompt although its attempt has ended: it holds the KV cache then.
        """
        if replica.stage not in self.stages:
            return True
        request_id = self._owners.get(output.request_id)
        if request_id is not None:
            output.request_id = request_id
            return True
        if replica.stage == self._source and (held := _held(replica, output)) is not None:
            await self._releases.let_go(held)
        return False

    async def passed(self, replica: ReplicaId, output: EngineCoreOutput, payload: Any) -> bool:
        """Take an output of the source, and whatever the target need not pass on."""
        attempt = self._attempts.get(output.request_id)
        if replica.stage == self._target and attempt is not None:
            self._heard(attempt, output)
        if replica.stage != self._source or attempt is None:
            return False
        if payload is not None:
            await self._ask.rows(replica, output.request_id, payload)
        held = _held(replica, output)
        if self._attempts.get(output.request_id) is not attempt:  # it ended while its rows were told of
            if held is not None:
                await self._releases.let_go(held)
        elif output.finish_reason is not None:
            self._pools[self._source].release(output.request_id)
            await self._hand_over(attempt, replica, held)
        return True

    def _heard(self, attempt: _Attempt, output: EngineCoreOutput) -> None:
        """The target has what it needs of the source as soon as it says anything."""
        output.kv_transfer_params = None  # addresses of ours are nobody's business
        if attempt.handed is not None:
            assert attempt.target is not None
            self._releases.heard(attempt.target, attempt.handed)
            self._observer.fetched(self._source, self._target, time.monotonic() - attempt.handed)
            attempt.handed = attempt.held = None
        if output.finish_reason is not None:
            self._drop(output.request_id)

    async def _hand_over(self, attempt: _Attempt, holder: ReplicaId, held: Held | None) -> None:
        request_id = attempt.request.request_id
        attempt.held = held
        try:
            replica = self._ask.admit(self._target, attempt.request)
            if replica is None:
                return  # it begins anew when there is one
            request = self._for_target(attempt)
            attempt.target = replica
            self._handed[holder, replica] += 1
            self._observer.sent(request_id, self._source, replica)
            await self._replicas[replica].add(request)
        except Exception as error:  # one request's failure must not stop the stage's output loop
            failure = error if isinstance(error, OmniError) else RequestFailed(str(error))
            await self._ask.failed(request_id, self._target, failure)

    def _for_target(self, attempt: _Attempt) -> EngineCoreRequest:
        request_id = attempt.request.request_id
        self._owners.pop(attempt.engine_id, None)
        attempt.engine_id = self._name(request_id, "d")
        self._attempts[request_id] = attempt
        transfer = None if attempt.held is None else attempt.held.transfer
        if transfer is None:
            self._observer.alone(self._target)
        else:
            attempt.handed = time.monotonic()
        return decode_request(attempt.request, attempt.engine_id, transfer)

    async def forget(self, request_id: str) -> None:
        """The request has ended, or begins anew: no engine has it any more, and no KV cache is kept for it."""
        attempt = self._drop(request_id)
        if attempt is None:
            return
        source, target = (self._release(request_id, stage) for stage in self.stages)
        if source is not None:
            await source.abort([attempt.engine_id])
        held = attempt.held
        if target is not None:
            abort = target.abort([attempt.engine_id])
            await (abort if held is None else self._releases.tell(target.id, held, abort))
        elif held is not None and held.holder in self._replicas:
            await self._releases.let_go(held)

    def _release(self, request_id: str, stage: str) -> Replica | None:
        """A stage has nothing more to do for a request; the replica it was bound to, if that is there."""
        replica = self._pools[stage].release(request_id)
        return None if replica is None else self._replicas.get(replica)

    async def replica_up(self, replica: ReplicaId) -> None:
        """A replica of the target can say what nobody will fetch."""
        if replica.stage == self._target:
            await self._releases.target_up()

    async def replica_down(self, replica: ReplicaId) -> list[str]:
        """Requests that wait in the target for what a source had that is gone; another source computes it anew.

        Where there is no other, the target notices the loss by itself and computes it.
        """
        for pair in [pair for pair in self._handed if replica in pair]:
            del self._handed[pair]
        if replica.stage == self._target:
            await self._releases.target_down(replica)
        if replica.stage != self._source:
            return []
        self._releases.holder_down(replica)
        if not self._pools[self._source].takes_requests:
            return []
        waiting = {name: attempt.held for name, attempt in self._attempts.items() if attempt.handed is not None}
        return [name for name, held in waiting.items() if held is not None and held.holder == replica]

    def pairs(self) -> list[Pair]:
        """Those that are live, and what went from one to the other."""
        live = {replica for stage in self.stages for replica in self._pools[stage].replicas}
        waiting = [each for each in self._attempts.values() if each.handed is not None]
        fetching = Counter((each.held.holder, each.target) for each in waiting if each.held is not None)
        return [
            Pair(source, target, handed, fetching[source, target])
            for (source, target), handed in sorted(self._handed.items())
            if {source, target} <= live
        ]

    def _name(self, request_id: str, side: str) -> str:
        engine_id = f"{request_id}/{side}{next(self._numbers)}"
        self._owners[engine_id] = request_id
        return engine_id

    def _drop(self, request_id: str) -> _Attempt | None:
        attempt = self._attempts.pop(request_id, None)
        if attempt is not None:
            self._owners.pop(attempt.engine_id, None)
        return attempt


def text_way(
    source: str | None,
    target: str,
    pools: Mapping[str, StagePool],
    replicas: Mapping[ReplicaId, Replica],
    observer: Observer,
    ask: Asked,
) -> TextWay:
    """The way of text requests to the stage `target`, whose prompts `source` computes; None: it does so itself."""
    return OneStage(target) if source is None else Relay(source, target, pools, replicas, observer, ask)


def _held(replica: ReplicaId, output: EngineCoreOutput) -> Held | None:
    """What a finished prompt's output says about its KV cache; None: nothing is kept."""
    transfer = decode_transfer(output.kv_transfer_params) if output.finish_reason is FinishReason.LENGTH else None
    return None if transfer is None else Held(replica, transfer)
