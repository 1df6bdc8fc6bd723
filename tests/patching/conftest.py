"""Fixtures of the patching tests."""

from __future__ import annotations

import importlib
import itertools
import sys

import pytest

from tests.support.fake_vllm import FakeVllm

_numbers = itertools.count()


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A fresh stand-in for vLLM under a name of its own; forgotten afterwards."""
    fake = FakeVllm(tmp_path, f"fake_vllm_{next(_numbers)}")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield fake
    for name in [name for name in sys.modules if name.startswith(fake.folder.name)]:
        del sys.modules[name]
