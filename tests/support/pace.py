"""The speed of this machine now, for limits that hold while other programs run."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import psutil

SAMPLE_S = 0.05


def pace() -> float:
    """Return how many times longer than alone on its core a process takes now, at least 1: a factor of time limits."""
    began, used = time.monotonic(), time.thread_time()
    while time.thread_time() - used < SAMPLE_S:
        pass
    return max(1.0, (time.monotonic() - began) / SAMPLE_S)


def waited(processes: Iterable[psutil.Process], *, all_threads: bool = False) -> list[float]:
    """Return the seconds that the main thread of each process, or all its threads, has waited for a core so far."""
    folders = [Path(f"/proc/{each.pid}") for each in processes]
    files = [[*each.glob("task/*/schedstat")] if all_threads else [each / "schedstat"] for each in folders]
    return [sum(int(file.read_text().split()[1]) for file in each) / 1e9 for each in files]
