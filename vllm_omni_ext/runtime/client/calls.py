"""Calls of engine utilities (`collective_rpc`, `sleep`, ...): their replicas, and the replicas' answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

from vllm.v1.engine.exceptions import EngineDeadError

from vllm_omni_ext.errors import CallFailed, RequestFailed, StageUnavailable, UnknownMember
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.orchestrator.orchestrator import Replica
from vllm_omni_ext.pool.stage_pool import StagePool
from vllm_omni_ext.runtime.operator_state import ReplicasSlept

TIMEOUT_S = 600.0
"""Default time that a replica may take for a call with `targets`."""

SLEEP, WAKE, PROFILE = "sleep_async", "wake_up_async", "profile_async"
PAUSE, RESUME = "pause_scheduler_async", "resume_scheduler_async"


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer of one replica: a value or an error."""

    value: Any = None
    error: Exception | None = None


Replies: TypeAlias = dict[ReplicaId, Reply]


def _chained(values: list[list[Any]]) -> list[Any]:
    return [item for value in values for item in value]


def _in_all(values: list[Iterable[int]]) -> set[int]:
    return set.intersection(*map(set, values))


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """The behaviour of one utility call in a deployment of several engines.

    Attributes:
        fold: combines the answers of several replicas into the one that vLLM's caller expects; None: the first answer.
        every_stage: the call reaches every stage; otherwise only the frontend, which has the model of vLLM's callers.
        forgets_media: the call clears the engines' media caches, so this process must clear its own cache first.
        utility: name of the utility in vLLM's client; empty: the name of the call with `_async` appended.
        arguments: arguments that the utility takes before those of the call.
    """

    fold: Callable[[list[Any]], Any] | None = None
    every_stage: bool = False
    forgets_media: bool = False
    utility: str = ""
    arguments: tuple[Any, ...] = ()


OPERATOR_CALLS: Mapping[str, OperatorCall] = {
    "sleep": OperatorCall(every_stage=True, forgets_media=True),
    "wake_up": OperatorCall(all, every_stage=True),
    "is_sleeping": OperatorCall(any, every_stage=True),
    "release_kv_cache_memory": OperatorCall(every_stage=True, forgets_media=True),
    "pause_scheduler": OperatorCall(every_stage=True),
    "resume_scheduler": OperatorCall(every_stage=True),
    "is_scheduler_paused": OperatorCall(any, every_stage=True),
    "reset_prefix_cache": OperatorCall(all, every_stage=True),
    "reset_mm_cache": OperatorCall(every_stage=True, forgets_media=True),
    "reset_encoder_cache": OperatorCall(every_stage=True),
    "start_profile": OperatorCall(every_stage=True, utility=PROFILE, arguments=(True,)),
    "stop_profile": OperatorCall(every_stage=True, utility=PROFILE, arguments=(False,)),
    "add_lora": OperatorCall(all),
    "remove_lora": OperatorCall(all),
    "pin_lora": OperatorCall(all),
    "list_loras": OperatorCall(_in_all),
    "collective_rpc": OperatorCall(_chained),
    "compute_weight_checksums": OperatorCall(_chained),
}
"""By the name of vLLM's method. Any other call reaches the frontend and returns the first replica's answer."""

_BY_UTILITY = {call.utility or f"{name}_async": call for name, call in OPERATOR_CALLS.items()}


class Calls:
    """Sends utility calls to replicas.

    Args:
        replicas: the live replicas; the caller keeps the mapping up to date.
        pools: one per stage, in the order of the pipeline.
        frontend: name of the stage of calls without targets that concern one model.
        sides: the prefill and decode stages that callers address by one name, by that name.
    """

    def __init__(
        self,
        replicas: Mapping[ReplicaId, Replica],
        pools: Mapping[str, StagePool],
        frontend: str,
        sides: Mapping[str, Sequence[str]] = MappingProxyType({}),
    ) -> None:
        self.share: Callable[[ReplicasSlept], Awaitable[None]] = self._apply
        """Applies a change in every process that routes requests; only in this one if it is the only API server."""
        self._replicas = replicas
        self._pools = pools
        self._sides = sides
        self._frontend = frontend
        self._frontends = next((tuple(each) for each in sides.values() if frontend in each), (frontend,))

    def resolve(self, targets: Sequence[str]) -> tuple[ReplicaId, ...]:
        """The live replicas that `targets` (stage names and replica ids) name, each once, in the pipeline's order.

        Raises:
            UnknownMember: there is no such stage or live replica.
            StageUnavailable: a stage has no live replica.
        """
        if isinstance(targets, str):
            targets = (targets,)
        if not targets:
            raise UnknownMember(f"no targets; {self._known_targets()}")
        named = {replica for target in targets for replica in self._named(target)}
        return tuple(replica for replica in self._live(self._pools) if replica in named)

    def _named(self, target: str) -> tuple[ReplicaId, ...]:
        if target in self._pools or target in self._sides:
            return self._live_of(*self._sides.get(target, (target,)))
        for pool in self._pools.values():
            for replica in pool.replicas:
                if str(replica) == target:
                    return (replica,)
        raise UnknownMember(f"no stage or live replica '{target}'; {self._known_targets()}")

    def _known_targets(self) -> str:
        live = ", ".join(map(str, self._live(self._pools))) or "none"
        return f"stages: {', '.join([*self._sides, *self._pools])}; live replicas: {live}"

    def _live_of(self, *stages: str) -> tuple[ReplicaId, ...]:
        for stage in stages:
            if not self._pools[stage].replicas:
                raise StageUnavailable(f"stage '{stage}' has no live replica")
        return self._live(stages)

    def _live_frontend(self) -> tuple[ReplicaId, ...]:
        """All live replicas of the frontend. Prefill replicas may be missing: decode replicas answer without them."""
        return self._live_of(self._frontend) and self._live(self._frontends)

    def is_text(self, stage: str) -> bool:
        """Whether a stage is the frontend, or its prefill or decode side."""
        return stage in self._frontends or self._frontend in self._sides.get(stage, ())

    def common(self, stages: Set[str]) -> str | None:
        """The one stage, as callers name it, that all of these stages are or are sides of; None if there is none."""
        if len(stages) == 1:
            return next(iter(stages))
        return next((name for name, sides in self._sides.items() if stages <= {*sides}), None)

    def _live(self, stages: Iterable[str]) -> tuple[ReplicaId, ...]:
        return tuple(replica for stage in stages for replica in sorted(self._pools[stage].replicas))

    async def to(
        self, targets: Sequence[str], utility: str, *args: Any, timeout_s: float | None = TIMEOUT_S
    ) -> Replies:
        """Call a utility of vLLM's client in exactly the replicas that `targets` names.

        Args:
            timeout_s: a replica that has not answered by then counts as failed; None: no limit.

        Raises:
            UnknownMember: there is no such stage or live replica; no replica was called.
            StageUnavailable: a stage has no live replica; no replica was called.
        """
        return await self._send(self.resolve(targets), utility, args, timeout_s)

    async def everywhere(self, utility: str, *args: Any, **named: Any) -> Any:
        """Call all replicas of a call without targets, and return the one answer that vLLM's callers expect.

        Args:
            named: arguments that vLLM passes by name, in the order of the utility's parameters; they follow `args`.

        Raises:
            CallFailed: a replica has failed; the error has all answers.
            StageUnavailable: there is no live replica.
        """
        call = _BY_UTILITY.get(utility, OperatorCall())
        replicas = self._live(self._pools) if call.every_stage else self._live_frontend()
        if not replicas:
            raise StageUnavailable("no stage has a live replica")
        replies = await self._send(replicas, utility, (*args, *named.values()), None)
        values = [reply.value for reply in replies.values()]
        if failed(replies):
            raise CallFailed(replies)
        return call.fold(values) if call.fold else values[0]

    async def _send(
        self, replicas: Sequence[ReplicaId], utility: str, args: tuple[Any, ...], timeout_s: float | None
    ) -> Replies:
        if utility in (SLEEP, PAUSE):  # before the call, and also if it fails: vLLM pauses the engine first
            await self.share(ReplicasSlept(tuple(map(str, replicas)), asleep=True))
        answers = await asyncio.gather(*(_call(self._replicas[name], utility, args, timeout_s) for name in replicas))
        replies = dict(zip(replicas, answers, strict=True))
        if utility in (WAKE, RESUME):
            done = (lambda reply: reply.value) if utility == WAKE else (lambda reply: reply.error is None)
            woken = tuple(str(replica) for replica, reply in replies.items() if done(reply))  # fully awake
            await self.share(ReplicasSlept(woken, asleep=False))
        return replies

    async def _apply(self, change: ReplicasSlept) -> None:
        for replica in map(ReplicaId.parse, change.replicas):
            pool = self._pools[replica.stage]
            if change.asleep and replica in pool.replicas:
                pool.mark_asleep(replica)
            elif not change.asleep:
                pool.mark_awake(replica)


async def _call(replica: Replica, utility: str, args: tuple[Any, ...], timeout_s: float | None) -> Reply:
    if utility == PROFILE:
        args = _named_after(replica.id, args)
    try:
        async with asyncio.timeout(timeout_s):
            return Reply(await replica.call(utility, *args))
    except TimeoutError:
        return Reply(error=RequestFailed(f"no answer within {timeout_s:g} s"))
    except EngineDeadError:
        return Reply(error=StageUnavailable(f"replica {replica.id} is gone"))
    except Exception as error:  # no error of one replica may hide the answers of the others
        return Reply(error=error)


def _named_after(replica: ReplicaId, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments of `profile_async` with the replica's name, so that replicas do not overwrite each other's files."""
    start, prefix, *rest = (*args, None) if len(args) == 1 else args
    if not start:
        return args
    name = f"{replica.stage}-{replica.index}"
    return (start, f"{prefix}_{name}" if prefix else name, *rest)


def failed(replies: Replies) -> list[ReplicaId]:
    """The replicas that answered with an error or did not answer."""
    return [replica for replica, reply in replies.items() if reply.error is not None]
