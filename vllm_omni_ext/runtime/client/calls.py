"""Sends calls of engine utilities (`collective_rpc`, `sleep`, ...) to replicas, and combines the replicas' answers."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import wraps
from types import MappingProxyType
from typing import Any, TypeAlias

from vllm.model_executor.model_loader.utils import get_model_architecture
from vllm.model_executor.models.interfaces import supports_realtime, supports_transcription
from vllm.model_executor.models.interfaces_base import is_text_generation_model
from vllm.tasks import SupportedTask
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_omni_ext.errors import CallFailed, RequestError, RequestFailed, StageUnavailable, UnknownMember
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.observability.engine_stats import ReplicaStats
from vllm_omni_ext.orchestrator.orchestrator import Replica
from vllm_omni_ext.pool.stage_pool import StagePool
from vllm_omni_ext.runtime.client.replica_connections import ReplicaConnections
from vllm_omni_ext.runtime.control import AdapterLoaded, AdapterUnloaded, Change, OperatorState, ReplicasSlept

TIMEOUT_S = 600.0
"""Default time limit of each replica for a call with `targets`, in seconds."""

SLEEP, WAKE, PROFILE = "sleep_async", "wake_up_async", "profile_async"
PAUSE, RESUME = "pause_scheduler_async", "resume_scheduler_async"
REJECTING_PAUSE = "pause_generation_async"
"""vLLM 0.33's pause of one engine, which rejects new requests. Parts and chunks of running requests are new to it, so
that `PAUSE` is sent instead; the pools hold the requests."""
RPC = "collective_rpc_async"

DROPS_WEIGHTS = 2
"""vLLM's sleep level after which the weights must be loaded again."""

NEW_WEIGHTS = frozenset({"reload_weights", "start_weight_update", "update_weights"})
"""Methods of vLLM's workers that replace the weights of a loaded model."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer of one replica to a utility call: `value`, or an `error`."""

    value: Any = None
    error: Exception | None = None


Replies: TypeAlias = dict[ReplicaId, Reply]
Targets = Sequence[str]


def _chained(values: list[list[Any]]) -> list[Any]:
    return [item for value in values for item in value]


def _in_all(values: list[Iterable[int]]) -> set[int]:
    return set.intersection(*map(set, values))


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """How one utility call of vLLM's engine client is sent to several engines, and how their answers are combined.

    Attributes:
        fold: combines the answers of several replicas into the one that vLLM's caller expects; None: the first answer.
        every_stage: the call is sent to every stage; otherwise to the frontend only, whose model vLLM's callers use.
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
"""Calls by the name of the method of vLLM's `AsyncLLM`. Any other call is sent to the frontend (the stage that writes
text) and returns the first replica's answer."""

_BY_UTILITY = {call.utility or f"{name}_async": call for name, call in OPERATOR_CALLS.items()}


class Calls:
    """Sends utility calls (`sleep`, `collective_rpc`, ...) to replicas.

    Args:
        replicas: the live replicas; the caller keeps the mapping up to date.
        pools: one per stage, in the order of the pipeline.
        frontend: name of the stage that receives calls without targets that concern one model.
        sides: names of the prefill and the decode stage of each split stage, by the name of the split stage.
        own_models: stages that run a model class of the plugin. Such a class computes tensors from the weights when it
            loads them, or loads them in its own way, so that vLLM cannot replace the weights of the running model.
    """

    def __init__(
        self,
        replicas: Mapping[ReplicaId, Replica],
        pools: Mapping[str, StagePool],
        frontend: str,
        sides: Mapping[str, Sequence[str]] = MappingProxyType({}),
        *,
        own_models: Collection[str] = (),
    ) -> None:
        self.share: Callable[[ReplicasSlept], Awaitable[None]]
        """Applies an operator's change (replicas sleep or wake up) in all API servers; set by `TargetedLLM`."""
        self._replicas = replicas
        self._pools = pools
        self._sides = sides
        self._own_models = own_models
        self._frontend = frontend
        self._frontends = next((tuple(each) for each in sides.values() if frontend in each), (frontend,))

    def resolve(self, targets: Sequence[str]) -> tuple[ReplicaId, ...]:
        """Return the live replicas of `targets` (stage names and replica ids), each once, in the pipeline's order.

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
        """Return the live replicas of the frontend.

        If the frontend has prefill and decode replicas, the result has both, but prefill replicas may be missing:
        decode replicas then compute prompts themselves.

        Raises:
            StageUnavailable: the frontend (if split: its decode stage) has no live replica.
        """
        return self._live_of(self._frontend) and self._live(self._frontends)

    def is_text(self, stage: str) -> bool:
        """Whether a stage is the frontend (the stage that writes text), the split frontend, or a side of it."""
        return stage in self._frontends or self._frontend in self._sides.get(stage, ())

    def common(self, stages: Set[str]) -> str | None:
        """Return the only stage in `stages`, or the split stage whose prefill and decode stages they are; else None."""
        if len(stages) == 1:
            return next(iter(stages))
        return next((name for name, sides in self._sides.items() if stages <= {*sides}), None)

    def _live(self, stages: Iterable[str]) -> tuple[ReplicaId, ...]:
        return tuple(replica for stage in stages for replica in sorted(self._pools[stage].replicas))

    async def to(
        self, targets: Sequence[str], utility: str, *args: Any, timeout_s: float | None = TIMEOUT_S
    ) -> Replies:
        """Call a utility of vLLM's client in the replicas of `targets`, and in no others.

        Args:
            targets: stage names and replica ids.
            utility: name of a method of vLLM's `AsyncMPClient`, e.g. "sleep_async".
            timeout_s: a replica that has not answered after this time counts as failed; None: no limit.

        Returns:
            The answer or error of each replica.

        Raises:
            UnknownMember: there is no such stage or live replica; no replica was called.
            StageUnavailable: a stage has no live replica; no replica was called.
            RequestError: the call would replace weights that cannot be replaced; no replica was called.
        """
        return await self._send(self.resolve(targets), utility, args, timeout_s)

    async def everywhere(self, utility: str, *args: Any, **named: Any) -> Any:
        """Send a call without targets to all replicas that it concerns (`OPERATOR_CALLS`), and combine their answers.

        Args:
            utility: name of a method of vLLM's `AsyncMPClient`, e.g. "sleep_async".
            named: arguments that vLLM passes by name, in the order of the utility's parameters; they follow `args`.

        Returns:
            The one answer that vLLM's callers expect.

        Raises:
            CallFailed: a replica has failed; the error has all answers.
            StageUnavailable: there is no live replica.
            RequestError: the call would replace weights that cannot be replaced; no replica was called.
        """
        if utility == REJECTING_PAUSE:
            utility = PAUSE
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
        self._check_weights(replicas, utility, args)
        if utility in (SLEEP, PAUSE):  # before the call, and also if the call fails: vLLM pauses the engine first
            await self.share(ReplicasSlept(tuple(replicas), asleep=True))
        # A replica may have ended since.
        calls = (_call(name, self._replicas.get(name), utility, args, timeout_s) for name in replicas)
        answers = await asyncio.gather(*calls)
        replies = dict(zip(replicas, answers, strict=True))
        if utility in (WAKE, RESUME):
            done = (lambda reply: reply.value) if utility == WAKE else (lambda reply: reply.error is None)
            woken = tuple(replica for replica, reply in replies.items() if done(reply))  # fully awake ones
            await self.share(ReplicasSlept(woken, asleep=False))
        return replies

    def _check_weights(self, replicas: Sequence[ReplicaId], utility: str, args: tuple[Any, ...]) -> None:
        """Refuse a call that drops or replaces weights of a model whose weights cannot be replaced."""
        stages = dict.fromkeys(replica.stage for replica in replicas if replica.stage in self._own_models)
        if not stages:
            return
        names = f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(repr, stages))}"
        why = f"the weights of {names} cannot be loaded again without a restart"
        if utility == SLEEP and args[0] == DROPS_WEIGHTS:
            raise RequestError(f"sleep level 2: {why}; use level 1, or `targets` without them", parameter="level")
        if utility == RPC and args[0] in NEW_WEIGHTS:
            raise RequestError(f"{args[0]}: {why}", parameter="method")


async def _call(
    name: ReplicaId, replica: Replica | None, utility: str, args: tuple[Any, ...], timeout_s: float | None
) -> Reply:
    if utility == PROFILE:
        args = _named_after(name, args)
    try:
        if replica is None:
            raise EngineDeadError
        async with asyncio.timeout(timeout_s):
            return Reply(await replica.call(utility, *args))
    except TimeoutError:
        return Reply(error=RequestFailed(f"no answer within {timeout_s:g} s"))
    except EngineDeadError:
        return Reply(error=StageUnavailable(f"replica {name} is gone"))
    except Exception as error:  # no error of one replica may hide the answers of the others
        return Reply(error=error)


def _named_after(replica: ReplicaId, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Add the replica's name to the file prefix in arguments of `profile_async`: each replica needs its own files."""
    start, prefix, *rest = (*args, None) if len(args) == 1 else args
    if not start:
        return args
    name = f"{replica.stage}-{replica.index}"
    return (start, f"{prefix}_{name}" if prefix else name, *rest)


def failed(replies: Replies) -> list[ReplicaId]:
    """Return the replicas that answered with an error or did not answer."""
    return [replica for replica, reply in replies.items() if reply.error is not None]


def _with_targets(name: str) -> Any:
    """Return the method `name` of vLLM's `AsyncLLM`, extended by the keywords `targets` and `timeout_s`."""
    stock = getattr(AsyncLLM, name)
    signature = inspect.signature(stock)

    @wraps(stock)
    async def method(
        self: TargetedLLM,
        *args: Any,
        targets: Targets | None = None,
        timeout_s: float = TIMEOUT_S,
        **keywords: Any,
    ) -> Any:
        if targets is None:
            return await stock(self, *args, **keywords)
        bound = signature.bind(self, *args, **keywords)
        bound.apply_defaults()
        _, *arguments = bound.arguments.values()
        return await self.call(name, targets, *arguments, timeout_s=timeout_s)

    return method


def _tasks_of(model: type) -> tuple[SupportedTask, ...]:
    """Return the tasks of a generating model's class, by the same rules as vLLM's model runner."""
    if getattr(model, "supports_transcription_only", False):
        return ("transcription",)
    found: dict[SupportedTask, bool] = {
        "generate": is_text_generation_model(model),
        "transcription": supports_transcription(model),
        "realtime": supports_realtime(model),
    }
    return tuple(task for task, supported in found.items() if supported)


class TargetedLLM(AsyncLLM):
    """vLLM's `AsyncLLM`, whose utility methods below take two more keywords: `targets` and `timeout_s`.

    `targets` are stage names and replica ids, e.g. ["talker", "code2wav/0"]. With `targets`, a method calls these
    replicas only, and returns a `Reply` for each, by `ReplicaId`, also if some replicas fail. It raises UnknownMember
    for a name that no stage or live replica has, and StageUnavailable for a stage without a live replica, both before
    it calls any replica. `timeout_s` is the time limit of each replica; a replica that has not answered by then counts
    as failed. The `timeout` of `collective_rpc` replaces `timeout_s`.

    Without `targets`, a method returns one value, as in vLLM, and raises CallFailed if a replica fails. Calls that
    concern the whole deployment (sleeping, caches, profiles) are sent to all stages. Calls that concern a model
    (`collective_rpc`, LoRA) are sent to all replicas of the frontend, whose model vLLM's callers use.

    New requests are sent to awake replicas, and wait while a stage has none. Each replica writes its own profiles.
    """

    replica_stats: ReplicaStats | None = None
    """vLLM's statistics of all replicas; None without `log_stats`."""

    submit: Callable[[Change], Awaitable[None]] | None = None
    """Applies an operator's change (`runtime.control`) in all API servers; None: this process is the only one."""

    collective_rpc = _with_targets("collective_rpc")
    sleep = _with_targets("sleep")
    wake_up = _with_targets("wake_up")
    is_sleeping = _with_targets("is_sleeping")
    release_kv_cache_memory = _with_targets("release_kv_cache_memory")
    reset_prefix_cache = _with_targets("reset_prefix_cache")
    reset_mm_cache = _with_targets("reset_mm_cache")
    reset_encoder_cache = _with_targets("reset_encoder_cache")
    start_profile = _with_targets("start_profile")
    stop_profile = _with_targets("stop_profile")
    add_lora = _with_targets("add_lora")
    remove_lora = _with_targets("remove_lora")
    list_loras = _with_targets("list_loras")
    pin_lora = _with_targets("pin_lora")

    async def get_supported_tasks(self) -> tuple[SupportedTask, ...]:
        """Return the engine's tasks, as in vLLM. Without a live frontend replica: the tasks of the model's class."""
        try:
            return await super().get_supported_tasks()
        except StageUnavailable:
            return _tasks_of(get_model_architecture(self.model_config)[0])

    def _follow_operators(self, state: OperatorState, replicas: ReplicaConnections) -> None:
        """Store the operator state at the start, and the connections to which its later changes (`apply`) apply."""
        self.operator_state = state
        self.adapters_changed: Callable[[AdapterLoaded | AdapterUnloaded], None] = lambda change: None
        """Called with every adapter that was loaded or unloaded in any API server."""
        self._its_replicas = replicas
        self.calls.share = self.share

    async def share(self, change: Change) -> None:
        """Apply an operator's change in the whole deployment; returns when all API servers have applied it."""
        if self.submit is None:
            self.apply(change)
        else:
            await self.submit(change)

    def apply(self, change: Change) -> None:
        """Apply an operator's change (replicas sleep or wake up, an adapter is loaded or unloaded) in this process."""
        self.operator_state = self.operator_state.after(change)
        if isinstance(change, ReplicasSlept):
            self._its_replicas.slept(change.replicas, asleep=change.asleep)
        else:
            self.adapters_changed(change)

    @property
    def calls(self) -> Calls:
        """The `Calls` that sends utility calls to replicas."""
        calls: Calls = self.engine_core.calls
        return calls

    async def call(self, name: str, targets: Targets, *arguments: Any, timeout_s: float = TIMEOUT_S) -> Replies:
        """Call the method `name` of vLLM's `AsyncLLM` in the replicas of `targets`.

        Args:
            arguments: all arguments of vLLM's method, in order.

        Returns:
            The answer or error of each replica.
        """
        call = OPERATOR_CALLS[name]
        replicas = self.calls.resolve(targets)
        if call.forgets_media and (name != "sleep" or arguments[0] >= 1):
            await self._forget_media(replicas)
        if name == "collective_rpc" and arguments[1] is not None:
            timeout_s = arguments[1]
        utility = call.utility or f"{name}_async"
        replies = await self.calls.to(targets, utility, *call.arguments, *arguments, timeout_s=timeout_s)
        if name == "sleep":
            self._note_sleep([replica for replica, reply in replies.items() if reply.error is None], arguments[0])
        elif name == "wake_up":
            self._note_sleep([replica for replica, reply in replies.items() if reply.value], None)
        return replies

    async def _forget_media(self, replicas: Sequence[ReplicaId]) -> None:
        """Clear this process's media cache before the frontend's engines clear theirs."""
        if any(self.calls.is_text(replica.stage) for replica in replicas):
            self.renderer._join_mm_warmup()
            await self.renderer.clear_mm_cache_async()

    def _note_sleep(self, replicas: Sequence[ReplicaId], level: int | None) -> None:
        if self.replica_stats is not None:
            self.replica_stats.note_sleep(replicas, level)
