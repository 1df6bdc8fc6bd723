"""A tiny trained Qwen3-Omni checkpoint and tasks of lm-eval about it, as data of this package."""

from __future__ import annotations

from pathlib import Path


def qwen3_omni() -> Path:
    """Return the directory with the checkpoint; `vllm serve` can be started with it."""
    return Path(__file__).parent / "qwen3_omni"


def lm_eval_tasks() -> Path:
    """Return the directory of the tasks `tiny_world_*`, for lm-eval's `--include_path`."""
    return Path(__file__).parent / "lm_eval_tasks"
