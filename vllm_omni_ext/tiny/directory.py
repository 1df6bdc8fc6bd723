"""Prepares the directory of a tiny checkpoint, which `vllm-omni-ext tiny` writes.

A marker file allows a later command to overwrite the checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_omni_ext.errors import ConfigError

MARKER = "tiny_checkpoint.json"
"""File that describes the checkpoint. It is written first, since only a directory with this file is overwritten."""


def make_room(path: Path, files: Sequence[str]) -> None:
    """Create the directory, or remove the marker and `files` of an earlier checkpoint from it.

    Args:
        files: names of all files of a checkpoint.

    Raises:
        ConfigError: the path is a file, or a directory that is not empty and has no marker.
    """
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{path}: is a file; name a directory")
    path.mkdir(parents=True, exist_ok=True)
    entries = {entry.name for entry in path.iterdir()}
    if not entries:
        return
    if MARKER not in entries:
        raise ConfigError(f"{path}: is not empty and was not written by this command; name an empty or new directory")
    for name in entries & {*files, MARKER}:
        (path / name).unlink()


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write an indented JSON file in UTF-8."""
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
