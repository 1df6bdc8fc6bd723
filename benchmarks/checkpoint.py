"""The model of a benchmark: a given directory or hub id, or a tiny random checkpoint."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from vllm_omni_ext.model_plugins.qwen3_omni.tiny.qwen3_omni import write_qwen3_omni


def parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the argument `model`."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("model", nargs="?", help="directory or hub id; without it, a tiny random checkpoint")
    return made


@contextmanager
def checkpoint(model: str | None) -> Iterator[str]:
    """Yield the model's name; without one, write a tiny checkpoint to a temporary folder and remove it at the end."""
    if model is not None:
        yield model
        return
    with tempfile.TemporaryDirectory(prefix="omni-bench-") as folder:
        yield str(write_qwen3_omni(f"{folder}/model", seed=0, real_vocab=True))
