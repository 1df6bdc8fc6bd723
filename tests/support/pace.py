"""How fast this machine is now, for limits that hold beside other programs too."""

from __future__ import annotations

import time

SAMPLE_S = 0.05
"""Time on a core in which the pace is measured."""


def pace() -> float:
    """How many times longer than alone on its core a process takes now; at least 1.

    A limit of seconds times the pace is that limit on a quiet machine.
    """
    began, used = time.monotonic(), time.thread_time()
    while time.thread_time() - used < SAMPLE_S:
        pass
    return max(1.0, (time.monotonic() - began) / SAMPLE_S)
