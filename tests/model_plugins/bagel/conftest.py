"""The tiny model once for all tests of this folder."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_omni_ext.model_plugins.bagel.checkpoint import load_bagel
from vllm_omni_ext.model_plugins.bagel.model import Bagel
from vllm_omni_ext.model_plugins.bagel.prompts import Prompts
from vllm_omni_ext.model_plugins.bagel.tiny.bagel import write_bagel

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint; not to be changed."""
    return write_bagel(tmp_path_factory.mktemp("bagel") / "model")


@pytest.fixture(scope="session")
def model(checkpoint: Path) -> Bagel:
    """In float32."""
    return load_bagel(checkpoint)


@pytest.fixture(scope="session")
def model_bf16(checkpoint: Path) -> Bagel:
    """In bfloat16."""
    return load_bagel(checkpoint, dtype=torch.bfloat16)


@pytest.fixture(scope="session")
def prompts(model: Bagel) -> Prompts:
    return Prompts(model.tokens, model.sizes)


@pytest.fixture(scope="session")
def plain(model: Bagel, checkpoint: Path) -> Iterator[Any]:
    """The same model as a plain loop over the stored weights."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield importlib.import_module("bagel_plain").Plain(checkpoint, model)
    sys.path.remove(str(ROOT / "benchmarks"))
