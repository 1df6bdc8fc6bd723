"""The files of a tiny trained Qwen3-Omni checkpoint, as data of this package."""

from __future__ import annotations

from pathlib import Path


def qwen3_omni() -> Path:
    """Return the directory with the checkpoint; `vllm serve` can be started with it."""
    return Path(__file__).parent / "qwen3_omni"
