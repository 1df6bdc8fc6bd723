"""The directory that contains a tiny checkpoint, and the marker that allows to overwrite it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_omni_ext.errors import ConfigError

MARKER = "tiny_checkpoint.json"
"""Describes the checkpoint, and is written first: only a directory with this file is overwritten."""


def make_room(path: Path, files: Sequence[str]) -> None:
    """Create the directory, or remove those of `files` from it that an earlier checkpoint left.

    Raises:
        ConfigError: the path is a file, or a directory with files that were not written by this command.
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
    """Write one JSON file, indented."""
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
