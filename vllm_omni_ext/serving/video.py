"""Reads video in separate processes, because some damaged files crash the process that decodes them.

Every loader in vLLM's registry is replaced by one of the same name that runs the original in another process, so that
`--media-io-kwargs` and VLLM_VIDEO_LOADER_BACKEND keep their effect.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.multimodal.video import VIDEO_LOADER_REGISTRY

from vllm_omni_ext.serving.crash_isolation import CrashIsolatedCalls

TIMEOUT_S = 120.0
"""Wall time of one video. OpenCV decodes every frame up to the last sampled one, 400 to 1200 frames/s of 720p on two
cores: that is enough for half an hour of video. An endless file blocks one of vLLM's eight media threads this long."""

MEMORY_BYTES = 8 << 30
"""Memory of one video, all its sampled frames included: vLLM samples up to 768 of some models, of 6 MB at 1080p."""


@contextmanager
def install() -> Iterator[None]:
    """Inside the block, all video of this process is read in separate processes."""
    stock = dict(VIDEO_LOADER_REGISTRY.name2class)
    calls = CrashIsolatedCalls([__name__], timeout_s=TIMEOUT_S, memory_bytes=MEMORY_BYTES)
    _register({name: _elsewhere(calls, name, loader) for name, loader in stock.items()})
    try:
        yield
    finally:
        _register(stock)


def _register(loaders: dict[str, type]) -> None:
    for name, loader in loaders.items():
        on_gpu = VIDEO_LOADER_REGISTRY.backend_requires_gpu(name)
        VIDEO_LOADER_REGISTRY.register(name, requires_gpu=on_gpu)(loader)


def _elsewhere(calls: CrashIsolatedCalls, name: str, stock: Any) -> type:
    """Return a loader like `stock` that reads through `calls`."""
    return type(stock.__name__, (stock,), {"load_bytes": staticmethod(functools.partial(_load, calls, name, stock))})


def _load(calls: CrashIsolatedCalls, name: str, stock: Any, data: bytes, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Return frames, [frames, height, width, 3] uint8, and their metadata, as `stock.load_bytes` does."""
    if _on_gpu(name, options):
        return _read(stock, data, **options)
    return calls.call(functools.partial(_read, stock), data, options)


def _read(stock: Any, data: bytes, **options: Any) -> tuple[Any, dict[str, Any]]:
    frames, metadata = stock().load_bytes(data, **options)
    return frames, metadata


def _on_gpu(name: str, options: dict[str, Any]) -> bool:
    """Return whether frames are decoded on a GPU, which vLLM decides; GPU memory must belong to this process."""
    device = str(options.get("device", "cpu"))
    return device != "cpu" or any(
        VIDEO_LOADER_REGISTRY.backend_requires_gpu(each) for each in (name, options.get("backend", name))
    )
