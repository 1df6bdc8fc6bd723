"""Ties a process to its parent: the process ends when its parent has ended, and leaves Ctrl-C to its parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_SET_PARENT_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of prctl(2)."""


def die_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Ask the system to send this process a signal when the thread that started it has ended (Linux only).

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


def leave_interrupts_to_parent() -> None:
    """Ignore SIGINT from now on; called in the main thread.

    A terminal sends SIGINT to all processes of its group. vLLM's engine would abort its requests at once, while the
    parent still gives them time to end.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
