"""Calls of engine utilities (`collective_rpc`, `sleep`, ...): which replicas they reach, and what each answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

from vllm.v1.engine.exceptions import EngineDeadError

from vllm_omni_ext.errors import CallFailed, RequestFailed, StageUnavailable, UnknownMember
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.pool.stage_pool import StagePool
from vllm_omni_ext.runtime.replica import Replica

DEADLINE_S = 600.0
"""How long a replica may take for a call that names its targets, unless the caller says otherwise."""

SLEEP, WAKE, PROFILE = "sleep_async", "wake_up_async", "profile_async"

EVERY_STAGE = frozenset(
    {
        SLEEP,
        WAKE,
        PROFILE,
        "is_sleeping_async",
        "release_kv_cache_memory_async",
        "pause_scheduler_async",
        "resume_scheduler_async",
        "is_scheduler_paused_async",
        "reset_prefix_cache_async",
        "reset_mm_cache_async",
        "reset_encoder_cache_async",
    }
)
"""What is said of a whole deployment. Everything else is about the weights of one model: the text stage's."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What one replica answered: a value, or the error it failed with."""

    value: Any = None
    error: Exception | None = None


Replies: TypeAlias = dict[ReplicaId, Reply]


def _chained(values: list[list[Any]]) -> list[Any]:
    return [item for value in values for item in value]


FOLDS: Mapping[str, Callable[[list[Any]], Any]] = {
    WAKE: all,
    "reset_prefix_cache_async": all,
    "add_lora_async": all,
    "remove_lora_async": all,
    "pin_lora_async": all,
    "is_sleeping_async": any,
    "is_scheduler_paused_async": any,
    "list_loras_async": lambda values: set.intersection(*map(set, values)),
    "collective_rpc_async": _chained,
    "compute_weight_checksums_async": _chained,
}
"""Several replicas' answers as the one that vLLM's caller expects; where there is none, the first."""


class Calls:
    """Sends utility calls to replicas.

    Args:
        replicas: the live replicas, kept up to date by their owner.
        pools: one per stage, in the order of the pipeline.
        text_stage: name of the stage that vLLM's own callers mean.
        sides: stages that are one to callers, by the name they have together.
    """

    def __init__(
        self,
        replicas: Mapping[ReplicaId, Replica],
        pools: Mapping[str, StagePool],
        text_stage: str,
        sides: Mapping[str, Sequence[str]] = MappingProxyType({}),
    ) -> None:
        self._replicas = replicas
        self._pools = pools
        self._sides = sides
        self._text_stage = text_stage
        self._text_stages = next((tuple(each) for each in sides.values() if text_stage in each), (text_stage,))

    def resolve(self, targets: Sequence[str]) -> tuple[ReplicaId, ...]:
        """The live replicas that `targets` (stage names and replica ids) name, each once, in the pipeline's order.

        Raises:
            UnknownMember: there is no such stage or live replica.
            StageUnavailable: a stage has no live replica.
        """
        if isinstance(targets, str):
            targets = (targets,)
        if not targets:
            raise UnknownMember(f"no targets; {self._known()}")
        named = {replica for target in targets for replica in self._named(target)}
        return tuple(replica for replica in self._live(self._pools) if replica in named)

    def _named(self, target: str) -> tuple[ReplicaId, ...]:
        if target in self._pools or target in self._sides:
            return self._live_of(*self._sides.get(target, (target,)))
        for pool in self._pools.values():
            for replica in pool.replicas:
                if str(replica) == target:
                    return (replica,)
        raise UnknownMember(f"no stage or live replica '{target}'; {self._known()}")

    def _known(self) -> str:
        live = ", ".join(map(str, self._live(self._pools))) or "none"
        return f"stages: {', '.join([*self._sides, *self._pools])}; live replicas: {live}"

    def _live_of(self, *stages: str) -> tuple[ReplicaId, ...]:
        for stage in stages:
            if not self._pools[stage].replicas:
                raise StageUnavailable(f"stage '{stage}' has no live replica")
        return self._live(stages)

    def _live_text(self) -> tuple[ReplicaId, ...]:
        """All of the text stage; it answers without those that only compute prompts."""
        return self._live_of(self._text_stage) and self._live(self._text_stages)

    def is_text(self, stage: str) -> bool:
        """Whether a stage is the text stage, or a side of it."""
        return stage in self._text_stages or self._text_stage in self._sides.get(stage, ())

    def common(self, stages: Set[str]) -> str | None:
        """The one stage that all of these are or belong to, as callers know it; None if there is none."""
        if len(stages) == 1:
            return next(iter(stages))
        return next((name for name, sides in self._sides.items() if stages <= {*sides}), None)

    def _live(self, stages: Iterable[str]) -> tuple[ReplicaId, ...]:
        return tuple(replica for stage in stages for replica in sorted(self._pools[stage].replicas))

    async def to(
        self, targets: Sequence[str], utility: str, *args: Any, deadline_s: float | None = DEADLINE_S
    ) -> Replies:
        """Call a utility of vLLM's client in the replicas that are named, and nowhere else.

        Args:
            deadline_s: a replica that has not answered by then has failed; None waits as long as it takes.

        Raises:
            UnknownMember: there is no such stage or live replica; nobody was called.
            StageUnavailable: a stage has no live replica; nobody was called.
        """
        return await self._send(self.resolve(targets), utility, args, deadline_s)

    async def everywhere(self, utility: str, *args: Any) -> Any:
        """A call that names no targets: the answer vLLM's callers expect, from all replicas that are meant.

        Raises:
            CallFailed: a replica has failed; has all answers.
            StageUnavailable: there is no live replica.
        """
        whole = utility in EVERY_STAGE
        replicas = self._live(self._pools) if whole else self._live_text()
        if not replicas:
            raise StageUnavailable("no stage has a live replica")
        replies = await self._send(replicas, utility, args, None)
        values = [reply.value for reply in replies.values()]
        if failed(replies):
            raise CallFailed(replies)
        return FOLDS[utility](values) if utility in FOLDS else values[0]

    async def _send(
        self, replicas: Sequence[ReplicaId], utility: str, args: tuple[Any, ...], deadline_s: float | None
    ) -> Replies:
        if utility == SLEEP:  # before it is, and also if that fails: vLLM pauses the engine first
            for replica in replicas:
                self._pools[replica.stage].rest(replica)
        answers = await asyncio.gather(*(_call(self._replicas[name], utility, args, deadline_s) for name in replicas))
        replies = dict(zip(replicas, answers, strict=True))
        if utility == WAKE:
            for replica, reply in replies.items():
                if reply.value:  # fully awake
                    self._pools[replica.stage].rouse(replica)
        return replies


async def _call(replica: Replica, utility: str, args: tuple[Any, ...], deadline_s: float | None) -> Reply:
    if utility == PROFILE:
        args = _named_after(replica.id, args)
    try:
        async with asyncio.timeout(deadline_s):
            return Reply(await replica.call(utility, *args))
    except TimeoutError:
        return Reply(error=RequestFailed(f"no answer within {deadline_s:g} s"))
    except EngineDeadError:
        return Reply(error=StageUnavailable(f"replica {replica.id} is gone"))
    except Exception as error:  # whatever the replica failed with must not hide what the others answered
        return Reply(error=error)


def _named_after(replica: ReplicaId, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments of `profile_async` under which replicas do not overwrite each other's files."""
    start, prefix, *rest = (*args, None) if len(args) == 1 else args
    if not start:
        return args
    name = f"{replica.stage}-{replica.index}"
    return (start, f"{prefix}_{name}" if prefix else name, *rest)


def failed(replies: Replies) -> list[ReplicaId]:
    """The replicas that answered with an error, or not at all."""
    return [replica for replica, reply in replies.items() if reply.error is not None]
