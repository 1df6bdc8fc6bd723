"""The speakers of a checkpoint, which are in a file of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_omni_ext.errors import ConfigError

SPEAKERS_FILE = "spk_dict.pt"


def speakers_of(model: str, revision: str | None = None) -> Mapping[str, Mapping[str, Any]]:
    """Return each speaker's `bos_token` (int), `cond` [1, width] and `ref_mel` [1, frames, mel], by name.

    Args:
        model: directory or name of the checkpoint.

    Raises:
        ConfigError: the checkpoint has no such file.
    """
    import torch
    from transformers.utils import cached_file

    try:
        path = cached_file(model, SPEAKERS_FILE, revision=revision)
    except OSError as error:
        raise ConfigError(f"model: {SPEAKERS_FILE} with the speakers cannot be read: {error}") from error
    speakers: Mapping[str, Mapping[str, Any]] = torch.load(path, weights_only=True, map_location="cpu")
    return speakers
