"""vLLM's `AsyncLLM` whose utilities take `targets`: stages and replicas by name."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from functools import wraps
from typing import Any

from vllm.model_executor.model_loader.utils import get_model_architecture
from vllm.model_executor.models.interfaces import supports_realtime, supports_transcription
from vllm.model_executor.models.interfaces_base import is_text_generation_model
from vllm.tasks import SupportedTask
from vllm.v1.engine.async_llm import AsyncLLM

from vllm_omni_ext.errors import StageUnavailable
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.observability.engine_stats import ReplicaStats
from vllm_omni_ext.runtime.client.calls import OPERATOR_CALLS, TIMEOUT_S, Calls, Replies
from vllm_omni_ext.runtime.client.replica_connections import ReplicaConnections
from vllm_omni_ext.runtime.operator_state import AdapterLoaded, AdapterUnloaded, Change, OperatorState, ReplicasSlept

Targets = Sequence[str]


def _with_targets(name: str) -> Any:
    """vLLM's method of that name, with the keywords `targets` and `timeout_s`."""
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
    """The tasks that vLLM's model runner reads from a loaded model that generates."""
    if getattr(model, "supports_transcription_only", False):
        return ("transcription",)
    found: dict[SupportedTask, bool] = {
        "generate": is_text_generation_model(model),
        "transcription": supports_transcription(model),
        "realtime": supports_realtime(model),
    }
    return tuple(task for task, supported in found.items() if supported)


class TargetedLLM(AsyncLLM):
    """Every method below is vLLM's and takes two more keywords.

    `targets` are stage names and replica ids, e.g. ["talker", "code2wav/0"]. Then exactly these are called, and the
    answer is a `Reply` for each of them, by `ReplicaId`, also if some replicas fail. A name that no stage or live
    replica has raises UnknownMember, a stage without a live replica StageUnavailable, both before any replica is
    called. `timeout_s` is each replica's time limit; a replica that has not answered by then counts as failed. The
    `timeout` of `collective_rpc` is also its deadline.

    Without `targets` the answer is one value, as in vLLM, and a replica that fails raises CallFailed. Calls that
    concern the deployment as a whole (sleeping, caches, profiles) then reach all stages; calls that concern a model
    (`collective_rpc`, LoRA) reach all replicas of the frontend, which has the model of vLLM's callers.

    New requests go to awake replicas, and wait while a stage has none. Profiles are files with the replica's name.
    """

    replica_stats: ReplicaStats | None = None
    """vLLM's statistics of all replicas; None without `log_stats`."""

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
        """The engine's tasks, as in vLLM; without a live replica of the frontend, those of its model's class."""
        try:
            return await super().get_supported_tasks()
        except StageUnavailable:
            return _tasks_of(get_model_architecture(self.model_config)[0])

    def _follow_operators(self, state: OperatorState, replicas: ReplicaConnections) -> None:
        """Apply the changes of operators until now, and every later change."""
        self.operator_state = state
        self.submit: Callable[[Change], Awaitable[None]] = self._apply_alone
        """Makes a change in every API server of the deployment; only here if there are none."""
        self.adapters_changed: Callable[[AdapterLoaded | AdapterUnloaded], None] = lambda change: None
        """Called with every adapter that was loaded or unloaded in any API server."""
        self._its_replicas = replicas
        self.calls.share = self.share

    async def share(self, change: Change) -> None:
        """Make an operator's change in the whole deployment; returns when every API server acts on it."""
        await self.submit(change)

    def apply(self, change: Change) -> None:
        """Act on a change from now on."""
        self.operator_state = self.operator_state.after(change)
        if isinstance(change, ReplicasSlept):
            self._its_replicas.slept(map(ReplicaId.parse, change.replicas), asleep=change.asleep)
        else:
            self.adapters_changed(change)

    async def _apply_alone(self, change: Change) -> None:
        self.apply(change)

    @property
    def calls(self) -> Calls:
        """The `Calls` that sends utility calls to replicas."""
        calls: Calls = self.engine_core.calls
        return calls

    async def call(self, name: str, targets: Targets, *arguments: Any, timeout_s: float = TIMEOUT_S) -> Replies:
        """Call the method of that name with `targets`.

        Args:
            arguments: all arguments of vLLM's method, in order.
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
