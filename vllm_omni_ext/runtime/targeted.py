"""vLLM's `AsyncLLM` whose utilities take `targets`: stages and replicas by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.v1.engine import PauseMode
from vllm.v1.engine.async_llm import AsyncLLM

from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.observability.engine_stats import note_sleep
from vllm_omni_ext.runtime.calls import DEADLINE_S, SLEEP, WAKE, Calls

Targets = Sequence[str]


class TargetedLLM(AsyncLLM):
    """Every method below is vLLM's and takes two more keywords.

    `targets` are stage names and replica ids, e.g. ["talker", "code2wav/0"]. Then exactly these are called, and the
    answer is a `Reply` for each of them, by `ReplicaId`, whatever became of the others. A name that no stage or live
    replica has raises UnknownMember, a stage without a live replica StageUnavailable, both before anybody is called.
    `deadline_s` is how long each replica may take; one that has not answered by then has failed.

    Without `targets` the answer is one value, as in vLLM, and a replica that fails raises CallFailed. What concerns the
    deployment as a whole (sleeping, caches, profiles) then reaches all stages; what concerns a model (`collective_rpc`,
    LoRA) reaches all replicas of the text stage, which is the model that vLLM's callers know.
    """

    _engine_numbers: Mapping[ReplicaId, int]

    @property
    def calls(self) -> Calls:
        """Where calls go."""
        calls: Calls = self.engine_core.calls
        return calls

    async def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        targets: Targets | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> Any:
        """Call a method of workers; a replica's value is a list with one result for each of its workers.

        Args:
            timeout: seconds, for vLLM's executor; with `targets` it is also the deadline.
        """
        if targets is None:
            return await super().collective_rpc(method, timeout, args, kwargs)
        deadline = deadline_s if timeout is None else timeout
        return await self.calls.to(targets, "collective_rpc_async", method, timeout, args, kwargs, deadline_s=deadline)

    async def sleep(
        self,
        level: int = 1,
        mode: PauseMode = "abort",
        *,
        targets: Targets | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> Any:
        """Put engines to sleep. New requests go to awake replicas; a stage without any lets them wait.

        Args:
            mode: what becomes of requests that run; with "wait" and "keep" they go on in stages that sleep when these
                are woken, with "abort" they fail.
        """
        if targets is None:
            await super().sleep(level, mode)
            return None
        replicas = self.calls.resolve(targets)
        if level >= 1:
            await self._forget_media(replicas)
        replies = await self.calls.to(targets, SLEEP, level, mode, deadline_s=deadline_s)
        self._note_sleep([replica for replica, reply in replies.items() if reply.error is None], level)
        return replies

    async def release_kv_cache_memory(self, *, targets: Targets | None = None, deadline_s: float = DEADLINE_S) -> Any:
        """Give the memory of KV caches back; the engines must be paused."""
        if targets is None:
            await super().release_kv_cache_memory()
            return None
        await self._forget_media(self.calls.resolve(targets))
        return await self.calls.to(targets, "release_kv_cache_memory_async", deadline_s=deadline_s)

    async def wake_up(
        self, tags: list[str] | None = None, *, targets: Targets | None = None, deadline_s: float = DEADLINE_S
    ) -> Any:
        """Wake engines up; true for each that is fully awake."""
        if targets is None:
            return await super().wake_up(tags)
        replies = await self.calls.to(targets, WAKE, tags, deadline_s=deadline_s)
        self._note_sleep([replica for replica, reply in replies.items() if reply.value], None)
        return replies

    async def is_sleeping(self, *, targets: Targets | None = None, deadline_s: float = DEADLINE_S) -> Any:
        """Whether an engine sleeps; without `targets`: whether any does."""
        if targets is None:
            return await super().is_sleeping()
        return await self.calls.to(targets, "is_sleeping_async", deadline_s=deadline_s)

    async def reset_prefix_cache(
        self,
        reset_running_requests: bool = False,
        reset_connector: bool = False,
        *,
        targets: Targets | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> Any:
        """Forget cached prefixes; false where running requests still hold blocks."""
        given = (reset_running_requests, reset_connector)
        if targets is None:
            return await super().reset_prefix_cache(*given)
        return await self.calls.to(targets, "reset_prefix_cache_async", *given, deadline_s=deadline_s)

    async def reset_mm_cache(self, *, targets: Targets | None = None, deadline_s: float = DEADLINE_S) -> Any:
        """Forget processed media; for the text stage also those that this process keeps."""
        if targets is None:
            await super().reset_mm_cache()
            return None
        await self._forget_media(self.calls.resolve(targets))
        return await self.calls.to(targets, "reset_mm_cache_async", deadline_s=deadline_s)

    async def reset_encoder_cache(self, *, targets: Targets | None = None, deadline_s: float = DEADLINE_S) -> Any:
        """Forget encoded media."""
        if targets is None:
            await super().reset_encoder_cache()
            return None
        return await self.calls.to(targets, "reset_encoder_cache_async", deadline_s=deadline_s)

    async def start_profile(
        self,
        profile_prefix: str | None = None,
        *,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
        targets: Targets | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> Any:
        """Start profilers; each replica's name is added to the prefix of its files. With `targets`, not our own."""
        if targets is None:
            await super().start_profile(
                profile_prefix, delay_iterations=delay_iterations, max_iterations=max_iterations
            )
            return None
        given = (True, profile_prefix, delay_iterations, max_iterations)
        return await self.calls.to(targets, "profile_async", *given, deadline_s=deadline_s)

    async def stop_profile(self, *, targets: Targets | None = None, deadline_s: float = DEADLINE_S) -> Any:
        """Stop profilers, which then write their files."""
        if targets is None:
            await super().stop_profile()
            return None
        return await self.calls.to(targets, "profile_async", False, deadline_s=deadline_s)

    async def add_lora(
        self, lora_request: LoRARequest, *, targets: Targets | None = None, deadline_s: float = DEADLINE_S
    ) -> Any:
        """Load an adapter."""
        if targets is None:
            return await super().add_lora(lora_request)
        return await self.calls.to(targets, "add_lora_async", lora_request, deadline_s=deadline_s)

    async def remove_lora(self, lora_id: int, *, targets: Targets | None = None, deadline_s: float = DEADLINE_S) -> Any:
        """Remove an adapter."""
        if targets is None:
            return await super().remove_lora(lora_id)
        return await self.calls.to(targets, "remove_lora_async", lora_id, deadline_s=deadline_s)

    async def list_loras(self, *, targets: Targets | None = None, deadline_s: float = DEADLINE_S) -> Any:
        """Ids of loaded adapters; without `targets`: of those that every replica of the text stage has."""
        if targets is None:
            return await super().list_loras()
        return await self.calls.to(targets, "list_loras_async", deadline_s=deadline_s)

    async def pin_lora(self, lora_id: int, *, targets: Targets | None = None, deadline_s: float = DEADLINE_S) -> Any:
        """Keep an adapter from being evicted."""
        if targets is None:
            return await super().pin_lora(lora_id)
        return await self.calls.to(targets, "pin_lora_async", lora_id, deadline_s=deadline_s)

    async def _forget_media(self, replicas: Sequence[ReplicaId]) -> None:
        """Before the text stage's engines forget media that this process would no longer send them."""
        if any(self.calls.is_text(replica.stage) for replica in replicas):
            self.renderer._join_mm_warmup()
            await self.renderer.clear_mm_cache_async()

    def _note_sleep(self, replicas: Sequence[ReplicaId], level: int | None) -> None:
        if self.logger_manager is not None:
            engines = [self._engine_numbers[replica] for replica in replicas if replica in self._engine_numbers]
            note_sleep(self.logger_manager, engines, level)
