"""Sets the state that started processes inherit: caches, environment, threads, garbage collector, kernels, folder."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import os
import tempfile
import threading
from collections.abc import Iterator, Mapping
from types import MappingProxyType

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models import ModelRegistry
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.utils.import_utils import resolve_obj_by_qualname

from vllm_omni_ext.memory import malloc_trim
from vllm_omni_ext.plugins.registry import family_of, model_classes
from vllm_omni_ext.plugins.spec import resolve

LATE_IMPORTS = ("vllm.model_executor.layers.quantization.online.base",)
"""Modules that vLLM imports only while it loads a model. `preload` imports them once, before processes are forked."""

process_state = threading.RLock()
"""Lock, held while this process has the environment, folder, threads or output of a process to start.

All deployments of a program use it, because each block restores the state of its begin. `environment` takes it, and all
other changes are made in its block.
"""

# A child has no thread that would release the lock, if another thread of this process has forked it.
os.register_at_fork(after_in_child=process_state._at_fork_reinit)  # type: ignore[attr-defined]


def register_classes(family: str) -> None:
    """Register the model classes of a model family in vLLM's `ModelRegistry`, as classes instead of names.

    For a name, vLLM would start a process that imports vLLM again to inspect the class.
    """
    load_general_plugins()  # first, because it registers the plugin's models by name
    for architecture, target in model_classes(family_of(family)).items():
        ModelRegistry.register_model(architecture, resolve(target))


def preload(config: VllmConfig) -> None:
    """Import the worker and fill vLLM's caches of tokenizer and processor, so that forked processes need not do so."""
    resolve_obj_by_qualname(config.parallel_config.worker_cls)
    for name in LATE_IMPORTS:
        importlib.import_module(name)
    model = config.model_config
    if model.skip_tokenizer_init:
        return
    cached_tokenizer_from_config(model)
    if model.is_multimodal_model:
        MULTIMODAL_REGISTRY.create_processor(model).info.get_hf_processor()


@contextlib.contextmanager
def compute_threads(count: int) -> Iterator[None]:
    """Let processes forked inside the block compute with `count` threads.

    The number is set in the parent, because a child reads OMP_NUM_THREADS too late. With 1, OpenMP starts no thread
    team. If the parent has started a team before, a child that starts one waits forever for the parent's threads.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def frozen_heap(*, keep: bool) -> Iterator[None]:
    """Exclude the current objects from the garbage collection of processes forked inside the block.

    The collector writes into every object it visits, and the kernel copies each page written to: hundreds of MB per
    process.

    Args:
        keep: collect garbage first, and keep the objects frozen in this process after the block. Otherwise they are
            unfrozen after the block, unless other objects were frozen before, which would be unfrozen too.
    """
    keep_all = keep or gc.get_freeze_count() > 0
    if keep:
        gc.collect()
        malloc_trim()
    gc.freeze()
    try:
        yield
    finally:
        if not keep_all:
            gc.unfreeze()


@contextlib.contextmanager
def replaced_kernels() -> Iterator[None]:
    """Let processes forked inside the block inherit the kernels with which the platform replaces Triton's.

    Otherwise each worker searches all imported modules for them: 0.6 s of a core on a CPU without Triton's backend.
    """
    _replace_kernels()
    current_platform.register_triton_kernel_overrides = lambda: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        del vars(current_platform)["register_triton_kernel_overrides"]


@functools.cache
def _replace_kernels() -> None:
    current_platform.register_triton_kernel_overrides()


@contextlib.contextmanager
def temporary_files_in(folder: str) -> Iterator[None]:
    """Make replicas started inside the block put their temporary files into `folder`."""
    with environment({"TMPDIR": folder}):
        before, tempfile.tempdir = tempfile.tempdir, folder
        try:
            yield
        finally:
            tempfile.tempdir = before


@contextlib.contextmanager
def environment(values: Mapping[str, str], defaults: Mapping[str, str] = MappingProxyType({})) -> Iterator[None]:
    """Set environment variables for processes started inside the block; `defaults` do not override set variables.

    Every change inside the block is undone, because vLLM sets variables while it makes a config. Variables without a
    change are not written, because other threads of the program may read them meanwhile.
    """
    with process_state:
        before = dict(os.environ)
        os.environ.update({name: value for name, value in defaults.items() if name not in before} | dict(values))
        try:
            yield
        finally:
            for name in os.environ.keys() - before.keys():
                del os.environ[name]
            os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})
