"""For all tests."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import settings

settings.register_profile("any machine", deadline=None)  # how long an example takes says how busy the machine is
settings.load_profile("any machine")

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports a file of `benchmarks/` as a module; those that it imports are found there."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run what fails with real processes once more: a busy machine can break any limit. The summary says which did."""
    for item in items:
        if item.get_closest_marker("engine") or item.path.stem.endswith("_suite"):
            item.add_marker(pytest.mark.flaky(reruns=1))
