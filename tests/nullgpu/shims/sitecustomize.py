"""Imported by every Python process under the null device: vLLM gets results that no kernel has computed."""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


class After(importlib.abc.MetaPathFinder):
    """Runs a function after a module has been imported.

    Args:
        name: the module.
        action: called once.
    """

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self._name = name
        self._action = action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module's spec, whose loader also runs the action."""
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None and spec.loader is not None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            self._action()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Replace functions that need results of kernels, as soon as torch and vLLM's runner are imported."""

    def without_kernels() -> None:
        import no_kernels

        no_kernels.convolutions()

    def with_given_tokens() -> None:
        import no_kernels

        no_kernels.longest_sequences()
        no_kernels.sampled_tokens()

    def with_lengths_of_sounds() -> None:
        import no_kernels

        no_kernels.sound_lengths()

    def with_shapes_of_sounds() -> None:
        import no_kernels

        no_kernels.sound_shapes()

    def with_own_runtime() -> None:
        import vllm.distributed.device_communicators.cuda_wrapper as used

        # Otherwise NVIDIA's library, which is loaded too.
        used.find_loaded_library = lambda name: os.environ["LD_PRELOAD"]

    sys.meta_path.insert(0, After("vllm.distributed.device_communicators.cuda_wrapper", with_own_runtime))
    sys.meta_path.insert(0, After("vllm", without_kernels))
    sys.meta_path.insert(0, After("vllm.model_executor.models.qwen3_omni_moe_thinker", with_lengths_of_sounds))
    sys.meta_path.insert(0, After("transformers.models.qwen2_5_omni.modeling_qwen2_5_omni", with_shapes_of_sounds))
    sys.meta_path.insert(0, After("vllm.v1.worker.gpu_worker", with_given_tokens))


if "libnullgpu" in os.environ.get("LD_PRELOAD", ""):
    install()
