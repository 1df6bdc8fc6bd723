"""Detects a hung engine loop of a replica, and ends the process.

A loop is hung if it has work but begins no new iteration (a turn) within a limit. Other threads of the process run
during a hang, so their heartbeats do not show the state of the loop. The loop therefore counts its turns and steps in a
`LoopClock`, which a thread (`StepWatch`) reads. The loop has work unless it waits for its empty input queue. After the
limit without a turn, the replica sends no heartbeats. After 1.5 times the limit, the process is ended; its supervisor
moves its requests to other replicas and starts it again. A call (a utility of vLLM: sleep, LoRA load, `collective_rpc`)
has its own limit, `CALL_LIMIT_S`. vLLM completes a pause or sleep that waits for running steps after the call has
returned, in the loop. The limit of a call therefore also applies while the scheduler is paused and no step runs.

A step that never releases Python's global interpreter lock stops that thread, too. For this case, the thread restarts
a timer of the operating system at every reading. When the timer expires, the stacks of all threads are written into
the replica's log, and SIGALRM ends the process.
"""

from __future__ import annotations

import faulthandler
import logging
import math
import os
import queue
import signal
import threading
from collections.abc import Callable
from typing import Any

TICKS = 8
"""Number of readings of the clock within the limit."""

FATAL_TICKS = 12
"""Number of readings without progress after which the process is ended: 1.5 times the limit."""

FIRST_STEP_FACTOR = 10
"""Factor by which the limit is longer for the first step, in which kernels may be compiled."""

CALL_LIMIT_S = 600.0
"""Limit of a call in seconds, unless the limit of a step is longer. A large LoRA adapter is loaded within this time."""

STANDARD_ERROR = 2
"""File descriptor of the replica's log."""

log = logging.getLogger(__name__)


class LoopClock:
    """Counts the turns and steps of an engine loop. One thread writes, others may read.

    Attributes:
        begun: number of steps that have begun; an engine may begin a step before the previous step has ended.
        ended: number of steps that have ended.
        turns: number of times that the loop has read its input queue.
        calling: whether the loop executes a call (a utility of vLLM).

    Args:
        paused: returns whether the scheduler is paused; other threads call it.
    """

    def __init__(self, paused: Callable[[], bool] = lambda: False) -> None:
        self._paused = paused
        self.begun = 0
        self.ended = 0
        self.turns = 0
        self.calling = False
        self._inputs: LoopQueue | None = None

    def follow(self, inputs: queue.Queue[Any], call: Any) -> None:
        """Count the turns of a loop by the reads of its input queue.

        Args:
            inputs: queue of (type, message); its class is changed to `LoopQueue`.
            call: the type of messages that are calls.
        """
        inputs.__class__ = LoopQueue
        assert isinstance(inputs, LoopQueue)
        inputs.clock, inputs.call = self, call
        self._inputs = inputs

    def read(self) -> tuple[int, int, int]:
        """Return (`begun`, `ended`, `turns`); equal results of two calls show that the loop made no progress."""
        return self.begun, self.ended, self.turns

    @property
    def in_call(self) -> bool:
        """Whether the loop executes a call, or may complete one: a pause or sleep that waited for running steps."""
        return self.calling or (self.begun == self.ended and self._paused())

    @property
    def idle(self) -> bool:
        """Whether the loop has no work. True before the first turn: `startup_timeout_s` limits the start."""
        if self._inputs is None:
            return self.begun == self.ended
        return not self.turns or (self._inputs.waiting and self._inputs.empty_now())


class LoopQueue(queue.Queue[Any]):
    """An engine loop's input queue that counts the loop's turns. Only the loop reads it."""

    clock: LoopClock
    call: Any
    waiting = False

    def empty(self) -> bool:
        """Return whether the queue is empty, and count a turn: the loop calls this method in each turn."""
        self._turn()
        return super().empty()

    def empty_now(self) -> bool:
        """Return whether the queue is empty without counting a turn, for other threads."""
        return not self.queue

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Return the next item as `Queue` does, and count turns; `waiting` is set while the loop waits for input."""
        self._turn()
        self.waiting = block
        try:
            item = super().get(block, timeout)
        finally:
            self.waiting = False
        self._turn()
        self.clock.calling = item[0] == self.call
        return item

    def _turn(self) -> None:
        self.clock.turns += 1
        self.clock.calling = False


class LockFreeTimer:
    """Ends this process unless `wind_up` is called again within the limit, even if a thread holds the interpreter lock.

    The operating system sends SIGALRM. A handler of `faulthandler`, which needs no lock, writes the stacks of all
    threads. The signal then ends the process. `faulthandler.dump_traceback_later` would do the same, but blocks for
    ever in a process that was forked while its parent used it. The constructor must run in the main thread.
    """

    def __init__(self) -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # an inherited Python handler would need the lock
        faulthandler.register(signal.SIGALRM, file=STANDARD_ERROR, all_threads=True, chain=True)
        self._lock = threading.Lock()
        self._stopped = False

    def wind_up(self, limit_s: float) -> None:
        """Restart the timer: it ends the process after `limit_s` seconds, unless `wind_up` or `stop` is called."""
        with self._lock:
            if not self._stopped:
                signal.setitimer(signal.ITIMER_REAL, limit_s)

    def stop(self) -> None:
        """Stop the timer; later calls of `wind_up` do nothing."""
        with self._lock:
            self._stopped = True
            signal.setitimer(signal.ITIMER_REAL, 0)


class StepWatch:
    """Detects a loop with work that does not turn within the limit.

    Time is counted in readings of the `LoopClock`, not taken from a system clock. A process that is stopped, or gets no
    CPU time on a busy machine, makes no readings meanwhile. So it does not count as hung.

    Args:
        clock: written by the engine loop.
        limit_s: seconds that a turn or a step may take; more than 0.
        hung: called once, in the watching thread, after 1.5 times the limit.
        timer: ends the process if the next reading does not follow within the timer's limit; None: no timer.
    """

    def __init__(
        self, clock: LoopClock, limit_s: float, hung: Callable[[], None], timer: LockFreeTimer | None = None
    ) -> None:
        self._clock = clock
        self._period_s = limit_s / TICKS
        self._hung = hung
        self._timer = timer
        self._calls = max(1, math.ceil(CALL_LIMIT_S / limit_s))
        self._seen = (-1, -1, -1)
        self._ticks = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="omni-step-watch", daemon=True)

    @property
    def late(self) -> bool:
        """Whether the loop has work and has not turned within the limit."""
        return self._ticks >= TICKS * self._patience()

    def start(self) -> None:
        """Start the watching thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the watching thread, without waiting for its end, and the timer."""
        self._stopped.set()
        if self._timer is not None:
            self._timer.stop()

    def tick(self) -> bool:
        """Read the clock; return whether the loop is hung. Called every eighth of the limit."""
        now = self._clock.read()
        self._ticks = 0 if self._clock.idle or now != self._seen else self._ticks + 1
        self._seen = now
        return self._ticks >= FATAL_TICKS * self._patience()

    def _wind_up(self) -> None:
        if self._timer is not None:
            self._timer.wind_up(FATAL_TICKS * self._patience() * self._period_s)

    def _patience(self) -> int:
        first = 1 if self._clock.ended else FIRST_STEP_FACTOR
        return max(first, self._calls) if self._clock.in_call else first

    def _run(self) -> None:
        self._wind_up()
        while not self._stopped.wait(self._period_s):
            self._wind_up()
            if self.tick():
                self._hung()
                return


def end_hung_process(name: str, limit_s: float) -> None:
    """Log that this replica's engine loop is hung, and kill this process with SIGKILL.

    Args:
        name: the replica's name, for the log.
        limit_s: the limit that the loop has exceeded, in seconds.
    """
    message = "%s: its engine loop has not turned for more than %g s; the process is killed and started again"
    log.error(message, name, limit_s)
    os.kill(os.getpid(), signal.SIGKILL)
