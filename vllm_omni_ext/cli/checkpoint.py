"""Reads the sizes of a checkpoint's tensors from the headers of its safetensors files, without loading the tensors."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.plugins.memory import StoredTensors

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_LENGTH_BYTES = 8
"""Size of the integer at the beginning of a safetensors file, which is the length of the file's JSON header."""

_LONGEST_HEADER = 100_000_000
"""Limit of a header's bytes in the safetensors format."""


def checkpoint_folder(model: str, revision: str | None = None, download_dir: str | None = None) -> Path | None:
    """Return the folder of a model's files on this machine; None if they have not been downloaded."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    for name in (INDEX, SINGLE):
        try:
            found = try_to_load_from_cache(model, name, cache_dir=download_dir, revision=revision)
        except HFValidationError:  # neither a directory nor the name of a repository
            return None
        if isinstance(found, str):
            return Path(found).parent
    return None


def stored_tensors(folder: Path | None) -> StoredTensors | None:
    """Return (dtype, number of elements, number of bytes) of every tensor, by name.

    Returns:
        None if the checkpoint has no safetensors files, or if files in its index are missing.

    Raises:
        ConfigError: a file is not a valid safetensors file or index.
    """
    if folder is None:
        return None
    index = folder / INDEX
    try:
        weights = json.loads(index.read_bytes()).get("weight_map", {}) if index.is_file() else {"": SINGLE}
    except (OSError, ValueError) as err:
        raise ConfigError(f"model: '{index}' cannot be read: {err}") from err
    names = sorted(set(weights.values()))
    files = [folder / name for name in names]
    if not files or not all(file.is_file() for file in files):
        return None
    found: dict[str, tuple[str, int, int]] = {}
    for file in files:
        for name, entry in _header(file).items():
            begin, end = entry["data_offsets"]
            found[name] = (entry["dtype"], math.prod(entry["shape"]), end - begin)
    return found


def _header(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            if not 0 < length <= _LONGEST_HEADER:
                raise ValueError(f"a header of {length} bytes")
            header: dict[str, Any] = json.loads(stream.read(length))
    except (OSError, ValueError) as err:
        raise ConfigError(f"model: '{file}' is not a safetensors file: {err}") from err
    header.pop("__metadata__", None)
    return header
