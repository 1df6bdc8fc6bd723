"""Reads the speakers of a checkpoint from its file `spk_dict.pt`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_omni_ext.errors import ConfigError

SPEAKERS_FILE = "spk_dict.pt"


def speakers_of(model: str, revision: str | None = None) -> Mapping[str, Mapping[str, Any]]:
    """Return the data of each speaker by name.

    Keys of a speaker: `bos_token` (its text id in the talker's prompt), `cond` (embedding [1, width]) and `ref_mel`
    (reference spectrogram [1, frames, mel]).

    Args:
        model: directory or name of the checkpoint.
        revision: revision of the checkpoint on the Hugging Face Hub.

    Raises:
        ConfigError: the checkpoint has no file `spk_dict.pt`.
    """
    import torch
    from transformers.utils import cached_file

    try:
        path = cached_file(model, SPEAKERS_FILE, revision=revision)
    except OSError as error:
        raise ConfigError(f"model: {SPEAKERS_FILE} with the speakers cannot be read: {error}") from error
    speakers: Mapping[str, Mapping[str, Any]] = torch.load(path, weights_only=True, map_location="cpu")
    return speakers
