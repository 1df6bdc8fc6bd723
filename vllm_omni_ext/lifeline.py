"""Ties a process to its parent: the process ends when its parent has ended, and ignores Ctrl-C.

Also handles the signals that end a process (`exit_on_signals`), ends processes (`end_processes`), and describes the end
of a process (`how_it_ended`).
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
from collections.abc import Callable
from typing import Any

STOPS = (signal.SIGTERM, signal.SIGINT)
"""Signals that end a server."""

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


def exit_on_signals(stopping: threading.Event) -> None:
    """Make `STOPS` set `stopping` and raise SystemExit in this process; called once, in its main thread.

    A fork of this process that has no handlers of its own yet exits with status 0 instead. A signal that arrives while
    the main thread forks only sets `stopping`, so the caller must look at it after a fork: Python drops what is raised
    in a function of `os.register_at_fork`, and a lock that it releases, as that of `logging`, would stay locked.
    """
    process, forking = os.getpid(), threading.Event()

    def stop(*_: Any) -> None:  # runs in the main thread
        if os.getpid() != process:
            os._exit(0)
        stopping.set()
        if not forking.is_set():
            raise SystemExit(0)

    def if_main(change: Callable[[], None]) -> Callable[[], None]:
        return lambda: change() if threading.current_thread() is threading.main_thread() else None

    for number in STOPS:
        signal.signal(number, stop)
    # The last registered function runs first before a fork, and last after it.
    os.register_at_fork(before=if_main(forking.set), after_in_parent=if_main(forking.clear))


def end_on_signals() -> None:
    """Make `STOPS` end this process at once with status 0; for a process that has accepted no request yet.

    Not by an exception: it may arise where exceptions are dropped, as in a function of `os.register_at_fork`.
    """
    for number in STOPS:
        signal.signal(number, lambda *_: os._exit(0))


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
