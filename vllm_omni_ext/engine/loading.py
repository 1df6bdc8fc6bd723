"""Reports how many bytes of its weights a replica has read, from inside vLLM's own loader.

vLLM's registry of loaders is the hook. While a model is loaded, the load format's name stands for a loader that counts
the tensors it passes on and otherwise equals the original loader. The registration only affects this process.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any

from vllm.model_executor.model_loader import get_model_loader, register_model_loader

from vllm_omni_ext.wire.loading import ProgressSender

FORMATS = ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "npcache", "pt")
"""Load formats of vLLM's default loader, which passes tensors to the model one by one. Others are not counted."""

EVERY_S = 0.25
"""Shortest interval between two progress reports."""

SAFETENSORS = ".safetensors"
_LENGTH_BYTES = 8

Tensors = Iterable[tuple[str, Any]]


@contextmanager
def progress_reported(load_config: Any) -> Iterator[None]:
    """Inside the block, loading a model with this `LoadConfig` is reported; so is the end of the block, in any case."""
    sender = ProgressSender.of_this_process()
    if sender is None:
        yield
        return
    name = load_config.load_format
    try:
        if name in FORMATS:
            load_config.load_format = _register(type(get_model_loader(load_config)), name, sender)
        yield
        sender.send("warming up")
    finally:
        load_config.load_format = name
        sender.close()


def _register(base: type, name: str, sender: ProgressSender) -> str:
    """Register a loader that counts bytes; return its name in vLLM's registry."""

    class Counting(base):  # type: ignore[misc, valid-type]
        def __init__(self, load_config: Any) -> None:
            load_config = copy(load_config)
            load_config.load_format = name
            super().__init__(load_config)
            self._files: list[str] = []

        def _prepare_weights(self, model: str, *args: Any, **kwargs: Any) -> Any:
            if not os.path.isdir(model):
                sender.send("downloading", folder=str(hub_folder(model, self.load_config.download_dir)))
            found = super()._prepare_weights(model, *args, **kwargs)
            self._files += found[1]
            return found

        def load_weights(self, model: Any, model_config: Any) -> None:
            load = model.load_weights
            unused = getattr(model, "is_unused_checkpoint_weight", lambda name: False)

            def counted(weights: Tensors) -> Any:
                return load(counting(weights, sender, lambda: wanted_bytes(self._files, unused), unused))

            model.load_weights = counted
            try:
                super().load_weights(model, model_config)
            finally:
                del model.load_weights

    return _named(Counting, f"omni-{name}")


def _named(loader: type, name: str) -> str:
    register_model_loader(name)(loader)
    return name


def counting(
    weights: Tensors, sender: ProgressSender, total: Callable[[], int], unused: Callable[[str], bool]
) -> Iterator[tuple[str, Any]]:
    """Pass weights on and report how many bytes they had.

    Args:
        weights: (name, tensor) pairs; downloading happens before the first one.
        total: returns the bytes of all tensors that the model reads; called at the first tensor.
        unused: returns whether the model ignores the tensor of that name, which is then not counted.
    """
    loaded, size, reported = 0, 0, float("-inf")
    for name, tensor in weights:
        size = size or total()
        if time.monotonic() - reported >= EVERY_S:
            reported = time.monotonic()
            sender.send("loading", loaded=loaded, total=size)
        yield name, tensor
        loaded += 0 if unused(name) else tensor.nbytes
    sender.send("loading", loaded=size or loaded, total=size or loaded)


def wanted_bytes(files: Iterable[str], unused: Callable[[str], bool]) -> int:
    """Bytes of the tensors that a model reads from checkpoint files; files without a safetensors header count whole."""
    total = 0
    for path in map(Path, files):
        if path.suffix != SAFETENSORS:
            total += path.stat().st_size
            continue
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(_LENGTH_BYTES), "little")))
        places = (
            about["data_offsets"] for name, about in header.items() if name != "__metadata__" and not unused(name)
        )
        total += sum(end - start for start, end in places)
    return total


def hub_folder(model: str, download_dir: str | None) -> Path:
    """Return the folder in which the Hugging Face hub client stores a model's files."""
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.file_download import repo_folder_name

    return Path(download_dir or HF_HUB_CACHE, repo_folder_name(repo_id=model, repo_type="model"))
