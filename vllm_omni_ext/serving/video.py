"""Video is read in processes of their own: of damaged files, some end the process whose decoder opens them.

Every loader in vLLM's registry is replaced by one that runs it elsewhere, under its own name, so that what
`--media-io-kwargs` and VLLM_VIDEO_LOADER_BACKEND choose stays chosen.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.multimodal.video import VIDEO_LOADER_REGISTRY

from vllm_omni_ext.serving.offshoot import Offshoot

TIMEOUT_S = 120.0
"""Wall time of one video. OpenCV decodes every frame up to the last one sampled, at 400 to 1200 a second of 720p on two
cores: that is half an hour of video. A file that never ends holds one of vLLM's eight media threads for so long."""

MEMORY_BYTES = 8 << 30
"""Memory of one video, all its sampled frames included: vLLM's Qwen3-VL sampling takes up to 768, of 6 MB at 1080p."""


@contextmanager
def install() -> Iterator[Offshoot]:
    """Have all video of this process read elsewhere while the block runs.

    Forks, so it must come before the first request: until then other threads of the server wait for work, and hold no
    lock that the forked process would find locked.
    """
    stock = dict(VIDEO_LOADER_REGISTRY.name2class)
    offshoot = Offshoot(
        {name: functools.partial(_read, loader) for name, loader in stock.items()},
        timeout_s=TIMEOUT_S,
        memory_bytes=MEMORY_BYTES,
    )
    _register({name: _elsewhere(offshoot, name, loader) for name, loader in stock.items()})
    try:
        yield offshoot
    finally:
        _register(stock)
        offshoot.close()


def _register(loaders: dict[str, type]) -> None:
    for name, loader in loaders.items():
        on_gpu = VIDEO_LOADER_REGISTRY.backend_requires_gpu(name)
        VIDEO_LOADER_REGISTRY.register(name, requires_gpu=on_gpu)(loader)


def _elsewhere(offshoot: Offshoot, name: str, stock: Any) -> type:
    """A loader like `stock` that reads through `offshoot`."""
    return type(stock.__name__, (stock,), {"load_bytes": staticmethod(functools.partial(_load, offshoot, name, stock))})


def _load(offshoot: Offshoot, name: str, stock: Any, data: bytes, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Frames, [frames, height, width, 3] uint8, and their metadata, as `stock.load_bytes` gives them."""
    if _on_gpu(name, options):
        return _read(stock, data, **options)
    return offshoot.call(name, data, options)


def _read(stock: Any, data: bytes, **options: Any) -> tuple[Any, dict[str, Any]]:
    frames, metadata = stock().load_bytes(data, **options)
    return frames, metadata


def _on_gpu(name: str, options: dict[str, Any]) -> bool:
    """Whether the frames are decoded on a GPU: by vLLM's rules, and their memory belongs to this process."""
    device = str(options.get("device", "cpu"))
    return device != "cpu" or any(
        VIDEO_LOADER_REGISTRY.backend_requires_gpu(each) for each in (name, options.get("backend", name))
    )
