"""Ties a process to its parent: the process ends when its parent has ended, and ignores Ctrl-C.

Also ends processes (`end_processes`), and describes the end of a process (`how_it_ended`).
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
from typing import Any

SHARED = "/dev/shm"
"""Folder of POSIX shared memory on Linux."""

_SET_PARENT_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of prctl(2)."""


def die_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Make the system send this process a signal when the parent's thread that started it has ended (Linux only).

    Args:
        parent: process id of the parent; if the parent has ended already, the signal is sent now.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_SET_PARENT_DEATH_SIGNAL, int(number), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def end_with_process(pid: int) -> None:
    """Start a thread that ends this process with SIGKILL when the parent process has ended (Linux only).

    In contrast to `die_with_parent`, the end of the parent's thread that started this process has no effect.

    Args:
        pid: process id of the parent.
    """
    if sys.platform != "linux":
        return
    if os.getppid() != pid:
        os.kill(os.getpid(), signal.SIGKILL)
    parent = os.pidfd_open(pid)

    def wait() -> None:
        select.select([parent], [], [])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="omni-lifeline", daemon=True).start()


def leave_interrupts_to_parent() -> None:
    """Ignore SIGINT from now on; called in the main thread of a replica.

    With Ctrl-C, a terminal sends SIGINT to all processes of its group. vLLM's engine would abort its requests at once,
    but the parent waits for the requests before it ends its replicas.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def how_it_ended(exitcode: int | None) -> str:
    """Return a text with the exit code of a process, or the signal that killed it (a negative exit code)."""
    if exitcode is None or exitcode >= 0:
        return f"its process ended with exit code {exitcode}"
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = f"signal {-exitcode}"
    ended = f"its process was killed by {name}"
    return f"{ended}, as when a memory-mapped file does not fit: {_free_space()}" if name == "SIGBUS" else ended


def _free_space() -> str:
    """Return a text with the free space of the folders in which a deployment's processes map files."""
    places = (tempfile.gettempdir(), SHARED)
    return ", ".join(f"{place} has {shutil.disk_usage(place).free >> 20} MiB free" for place in places)


def end_processes(processes: list[Any], timeout_s: float) -> None:
    """Send SIGTERM to all processes at once, then SIGKILL to those alive after `timeout_s` seconds."""
    for process in processes:
        if process.is_alive():
            process.terminate()
    deadline = time.monotonic() + timeout_s
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
