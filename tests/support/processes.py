"""Tests without the marker `engine` start no process: they are the part of the suite that is run while one works."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import Any

import pytest

INSPECTION = ["-m", "vllm.model_executor.models.registry"]

_started: list[str] | None = None
"""Processes that the running test has started, if it must not start any."""


def watch() -> None:
    """Record forks and Python processes that the main thread starts from now on. Other programs are ignored.

    Libraries run those to inspect the machine, in the first test that needs them. vLLM inspects a model class in a
    process if its cache has no result for the class, which depends on earlier runs.
    """
    os.register_at_fork(before=lambda: _note("a fork"))
    start = subprocess.Popen.__init__

    def noted(process: subprocess.Popen[Any], args: Any, *more: Any, **options: Any) -> None:
        if isinstance(args, (list, tuple)) and list(args[:1]) == [sys.executable] and list(args[1:3]) != INSPECTION:
            _note(f"{args}")
        start(process, args, *more, **options)

    subprocess.Popen.__init__ = noted  # type: ignore[assignment,method-assign]


def begin(item: pytest.Item) -> None:
    """A test begins. Engines of other tests may start processes meanwhile, from threads.

    The tests of a suite (`..._suite.py`) run for a marked test, in a process of their own.
    """
    global _started
    suite = item.path.name.endswith("_suite.py") and not item.path.name.startswith("test_")
    _started = None if suite or item.get_closest_marker("engine") else []


def end() -> None:
    """A test has ended; it fails if it must not start a process and has started one."""
    if _started:
        pytest.fail(f"starts a process, so mark it `engine`: {_started[0]}", pytrace=False)


def _note(what: str) -> None:
    if _started is not None and threading.current_thread() is threading.main_thread():
        _started.append(what)
