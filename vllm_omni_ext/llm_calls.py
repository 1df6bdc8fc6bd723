"""vLLM's offline `LLM` whose utilities take `targets`: stages and replicas by name."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import wraps
from typing import TYPE_CHECKING, Any

from vllm.entrypoints.llm import LLM

from vllm_omni_ext.runtime.client.calls import TargetedLLM, Targets

if TYPE_CHECKING:
    from vllm_omni_ext.omni import AsyncOmni


def _offline(name: str) -> Any:
    """`TargetedLLM`'s method of that name, called from a thread without an event loop."""

    @wraps(getattr(TargetedLLM, name))
    def method(self: TargetedOfflineLLM, *args: Any, **keywords: Any) -> Any:
        return self._run(getattr(self._omni, name)(*args, **keywords))

    return method


class TargetedOfflineLLM(LLM):
    """vLLM's methods, with `targets` and `timeout_s` as in `runtime.client.calls.TargetedLLM`."""

    _omni: AsyncOmni

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        raise NotImplementedError

    collective_rpc = _offline("collective_rpc")
    sleep = _offline("sleep")
    wake_up = _offline("wake_up")
    is_sleeping = _offline("is_sleeping")
    release_kv_cache_memory = _offline("release_kv_cache_memory")
    reset_prefix_cache = _offline("reset_prefix_cache")
    reset_mm_cache = _offline("reset_mm_cache")
    reset_encoder_cache = _offline("reset_encoder_cache")
    start_profile = _offline("start_profile")
    stop_profile = _offline("stop_profile")
    add_lora = _offline("add_lora")
    remove_lora = _offline("remove_lora")
    list_loras = _offline("list_loras")
    pin_lora = _offline("pin_lora")

    def apply_model(self, func: Callable[[Any], Any], *, targets: Targets | None = None, **deadline: Any) -> Any:
        """Run a function on the model in every worker of the frontend, or of the targets."""
        return self.collective_rpc("apply_model", args=(func,), targets=targets, **deadline)
