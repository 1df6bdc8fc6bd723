"""Liveness of a replica's engine loop: finds a step that does not return, and ends the process.

Other threads of the process live on beside a hung step, so their heartbeats say nothing about the loop. The loop notes
the begin and the end of every step in a `StepClock`; a thread reads the clock. A step that takes longer than the
limit makes the replica unresponsive: no heartbeat is sent any more. A step that takes half as long again ends the
process, whose supervisor has other replicas take its requests over and starts it again.

A step that never releases Python's global interpreter lock stops that thread, too. For this case, the thread winds up
a timer of the system at every reading. When it is not wound up in time, what all threads do is written into the
replica's log, and the process is killed by SIGALRM.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import threading
from collections.abc import Callable

TICKS = 8
"""How often the clock is read within the limit."""

FATAL_TICKS = 12
"""A step that lasts for so many readings is not waited for any longer."""

FIRST_STEP_FACTOR = 10
"""The first step may take so many times the limit, because kernels may be compiled in it."""

STANDARD_ERROR = 2
"""File descriptor of the replica's log."""

log = logging.getLogger(__name__)


class StepClock:
    """Counts the steps that an engine loop has begun and ended. One thread writes, others may read.

    An engine may begin a step before the one before it has ended, so the loop is idle when both numbers are equal.
    """

    def __init__(self) -> None:
        self.begun = 0
        self.ended = 0


class LockFreeTimer:
    """Ends this process when it is not wound up again in time, even if a thread keeps the interpreter lock.

    The system sends SIGALRM; a handler of `faulthandler`, which needs no lock, writes what all threads do, and the
    signal then ends the process. `faulthandler.dump_traceback_later` would do the same, but blocks for ever in a
    process that was forked while its parent used it. Made in the main thread.
    """

    def __init__(self) -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # a handler of Python's, which may be inherited, needs the lock
        faulthandler.register(signal.SIGALRM, file=STANDARD_ERROR, all_threads=True, chain=True)
        self._lock = threading.Lock()
        self._stopped = False

    def wind_up(self, limit_s: float) -> None:
        """End the process after so many seconds unless this is called again, or `stop` is."""
        with self._lock:
            if not self._stopped:
                signal.setitimer(signal.ITIMER_REAL, limit_s)

    def stop(self) -> None:
        """Never end the process."""
        with self._lock:
            self._stopped = True
            signal.setitimer(signal.ITIMER_REAL, 0)


class StepWatch:
    """Tells whether a step takes longer than the limit.

    Time is counted in readings of the clock rather than taken from a system clock: a process that was stopped, or that
    a busy machine did not run, has read nothing meanwhile, and is not hung for that.

    Args:
        clock: written by the engine loop.
        limit_s: seconds that a step may take; more than 0.
        hung: called once, in the watching thread, when a step has taken half as long again.
        timer: ends the process if no reading follows in time; None: nothing does.
    """

    def __init__(
        self, clock: StepClock, limit_s: float, hung: Callable[[], None], timer: LockFreeTimer | None = None
    ) -> None:
        self._clock = clock
        self._period_s = limit_s / TICKS
        self._hung = hung
        self._timer = timer
        self._seen = (0, 0)
        self._ticks = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="omni-step-watch", daemon=True)

    @property
    def late(self) -> bool:
        """Whether the step under way takes longer than the limit."""
        return self._ticks >= TICKS * self._patience()

    def start(self) -> None:
        """Start the watching thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop watching. Returns at once."""
        self._stopped.set()
        if self._timer is not None:
            self._timer.stop()

    def tick(self) -> bool:
        """Read the clock; return whether the step under way is hung. Called every eighth of the limit."""
        now = (self._clock.begun, self._clock.ended)
        idle = now[0] == now[1]
        self._ticks = 0 if idle or now != self._seen else self._ticks + 1
        self._seen = now
        return self._ticks >= FATAL_TICKS * self._patience()

    def _wind_up(self) -> None:
        if self._timer is not None:
            self._timer.wind_up(FATAL_TICKS * self._patience() * self._period_s)

    def _patience(self) -> int:
        return 1 if self._clock.ended else FIRST_STEP_FACTOR

    def _run(self) -> None:
        self._wind_up()
        while not self._stopped.wait(self._period_s):
            self._wind_up()
            if self.tick():
                self._hung()
                return


def end_hung_process(name: str, limit_s: float) -> None:
    """Log that this replica's step is hung, and kill this process: its engine loop cannot end it."""
    message = "%s: its step has not returned for more than %g s; the process is killed and started again"
    log.error(message, name, limit_s)
    os.kill(os.getpid(), signal.SIGKILL)
