"""Copies the trained checkpoint, which is a package of its own: most installations need no 8 MB of weights."""

from __future__ import annotations

import shutil
from importlib import import_module
from pathlib import Path

from vllm_omni_ext.errors import ConfigError

PACKAGE = "vllm_omni_ext_tiny"


def trained_checkpoint() -> Path:
    """Return the directory of the installed trained checkpoint.

    Raises:
        ConfigError: the package with the checkpoint is not installed.
    """
    try:
        found = import_module(PACKAGE)
    except ModuleNotFoundError as err:
        if err.name != PACKAGE:
            raise
        raise ConfigError(
            "the trained checkpoint is a package of its own that is not installed; run: pip install vllm-omni-ext-tiny "
            "(in a clone of the repository: pip install dev/training/package)"
        ) from None
    return Path(found.qwen3_omni())


def copy_trained(path: Path) -> None:
    """Copy the trained checkpoint's files into an existing directory."""
    for file in sorted(trained_checkpoint().iterdir()):
        shutil.copyfile(file, path / file.name)
