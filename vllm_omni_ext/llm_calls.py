"""vLLM's offline `LLM` whose utilities take `targets`: stages and replicas by name."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from vllm.entrypoints.llm import LLM

if TYPE_CHECKING:
    from vllm.v1.engine import PauseMode

    from vllm_omni_ext.omni import AsyncOmni
    from vllm_omni_ext.runtime.targeted import Targets


class TargetedOfflineLLM(LLM):
    """vLLM's methods, with `targets` and `deadline_s` as in `runtime.targeted.TargetedLLM`."""

    _omni: AsyncOmni

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        raise NotImplementedError

    def collective_rpc(  # type: ignore[override]
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        targets: Targets | None = None,
        **deadline: Any,
    ) -> Any:
        """Call a method of every worker of the text stage, or of the targets."""
        return self._run(self._omni.collective_rpc(method, timeout, args, kwargs, targets=targets, **deadline))

    def apply_model(self, func: Callable[[Any], Any], *, targets: Targets | None = None, **deadline: Any) -> Any:
        """Run a function on the model in every worker of the text stage, or of the targets."""
        return self.collective_rpc("apply_model", args=(func,), targets=targets, **deadline)

    def sleep(
        self, level: int = 1, mode: PauseMode = "abort", *, targets: Targets | None = None, **deadline: Any
    ) -> Any:
        """Put all stages to sleep, or the targets."""
        return self._run(self._omni.sleep(level, mode, targets=targets, **deadline))

    def release_kv_cache_memory(self, *, targets: Targets | None = None, **deadline: Any) -> Any:
        """Give the memory of KV caches back."""
        return self._run(self._omni.release_kv_cache_memory(targets=targets, **deadline))

    def wake_up(self, tags: list[str] | None = None, *, targets: Targets | None = None, **deadline: Any) -> Any:
        """Wake all stages up, or the targets; true if fully awake."""
        return self._run(self._omni.wake_up(tags, targets=targets, **deadline))

    def is_sleeping(self, *, targets: Targets | None = None, **deadline: Any) -> Any:
        """Whether any stage sleeps, or each of the targets."""
        return self._run(self._omni.is_sleeping(targets=targets, **deadline))

    def reset_prefix_cache(
        self,
        reset_running_requests: bool = False,
        reset_connector: bool = False,
        *,
        targets: Targets | None = None,
        **deadline: Any,
    ) -> Any:
        """Forget cached prefixes."""
        given = (reset_running_requests, reset_connector)
        return self._run(self._omni.reset_prefix_cache(*given, targets=targets, **deadline))

    def reset_mm_cache(self, *, targets: Targets | None = None, **deadline: Any) -> Any:
        """Forget processed media."""
        return self._run(self._omni.reset_mm_cache(targets=targets, **deadline))

    def reset_encoder_cache(self, *, targets: Targets | None = None, **deadline: Any) -> Any:
        """Forget encoded media."""
        return self._run(self._omni.reset_encoder_cache(targets=targets, **deadline))

    def start_profile(  # type: ignore[override]
        self,
        profile_prefix: str | None = None,
        *,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
        targets: Targets | None = None,
        **deadline: Any,
    ) -> Any:
        """Start profilers in all stages, or in the targets."""
        bounds: dict[str, Any] = {"delay_iterations": delay_iterations, "max_iterations": max_iterations}
        return self._run(self._omni.start_profile(profile_prefix, **bounds, targets=targets, **deadline))

    def stop_profile(self, *, targets: Targets | None = None, **deadline: Any) -> Any:
        """Stop profilers, which then write their files."""
        return self._run(self._omni.stop_profile(targets=targets, **deadline))

    def add_lora(self, lora_request: Any, *, targets: Targets | None = None, **deadline: Any) -> Any:
        """Load an adapter in the text stage, or in the targets."""
        return self._run(self._omni.add_lora(lora_request, targets=targets, **deadline))

    def remove_lora(self, lora_id: int, *, targets: Targets | None = None, **deadline: Any) -> Any:
        """Remove an adapter."""
        return self._run(self._omni.remove_lora(lora_id, targets=targets, **deadline))

    def list_loras(self, *, targets: Targets | None = None, **deadline: Any) -> Any:
        """Ids of loaded adapters."""
        return self._run(self._omni.list_loras(targets=targets, **deadline))

    def pin_lora(self, lora_id: int, *, targets: Targets | None = None, **deadline: Any) -> Any:
        """Keep an adapter from being evicted."""
        return self._run(self._omni.pin_lora(lora_id, targets=targets, **deadline))
