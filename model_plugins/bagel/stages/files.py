"""Finds the files of the checkpoint that an engine serves."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from vllm_omni_ext.model_plugins.bagel.checkpoint import AUTOENCODER, MODEL, checkpoint_sizes
from vllm_omni_ext.model_plugins.bagel.sizes import BagelSizes

_FILES = ("*.json", "merges.txt", MODEL, AUTOENCODER)


def checkpoint_directory(model_config: Any) -> Path:
    """Return the directory with the checkpoint's files.

    A model of the Hugging Face hub is downloaded if it is not in the cache, because sizes are read from the files of
    the weights.

    Args:
        model_config: vLLM's `ModelConfig`.
    """
    return _directory(model_config.model, model_config.revision)


def model_sizes(model_config: Any) -> BagelSizes:
    """Return the model's dimensions, read from the checkpoint of vLLM's `ModelConfig`.

    Raises:
        CheckpointError: files of the checkpoint are missing or damaged.
    """
    return _sizes(checkpoint_directory(model_config))


@functools.lru_cache(maxsize=4)
def _directory(model: str, revision: str | None) -> Path:
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, revision=revision, allow_patterns=list(_FILES)))


@functools.lru_cache(maxsize=4)
def _sizes(directory: Path) -> BagelSizes:
    return checkpoint_sizes(directory)
