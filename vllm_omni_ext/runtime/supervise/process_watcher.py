"""Keeps child processes running: a child that has ended is restarted after a pause.

All decisions are made in one thread, an event loop. vLLM's clients do not detect the end of a killed engine. Waiting
for a child to be ready takes a thread per child, so that several can start at once; children that share a CUDA device
take turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from vllm_omni_ext.config.schema import OmniConfig
from vllm_omni_ext.errors import OmniError
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.lifeline import how_it_ended
from vllm_omni_ext.topology.placement import Turns

LONGEST_PAUSE_S = 30.0

DOUBLINGS = 64
"""More doublings than any pause needs to reach the longest one; bounds the exponent."""


class Final(OmniError):
    """An error that a restart would not fix."""


class Exited(OmniError):
    """A process has ended by itself."""

    def __init__(self, exitcode: int | None) -> None:
        super().__init__(how_it_ended(exitcode))
        self.exitcode = exitcode


@dataclass(frozen=True, eq=False)
class Child:
    """A process that is kept running. All attributes but `wait_ready` are called in the supervisor's thread.

    Attributes:
        start: starts the process and returns it; an exception counts as the end of the process.
        ended: called with the reason (`Exited`, or the error of the start). Returns the pause before a restart in
            seconds; None: no restart.
        wait_ready: waits until the process can be used; an exception counts as the end of the process.
        ready: called with the process once it can be used.
    """

    name: Any
    start: Callable[[], Any]
    ended: Callable[[Exception], float | None]
    wait_ready: Callable[[], None] = lambda: None
    ready: Callable[[Any], None] = lambda process: None


class ChildSupervisor:
    """Restarts children after their end.

    Args:
        turns: the children that start one after the other.
        closing: once set, events of children are ignored.
    """

    def __init__(self, turns: Turns, *, closing: threading.Event | None = None) -> None:
        self._turns = turns
        self._closing = closing or threading.Event()
        self._starting: dict[Any, Child] = {}
        self._waits: list[threading.Thread] = []
        # poll(2), unlike epoll(7), has no state in the kernel that forked children share.
        self._loop = asyncio.SelectorEventLoop(selectors.PollSelector())
        self._thread = threading.Thread(target=self._run, name="omni-supervisor", daemon=True)
        self._thread.start()

    def do(self, work: Callable[[], Any]) -> None:
        """Run `work` in the supervisor's thread, unless that has ended; may be called by any thread."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(work)

    def after(self, pause_s: float, work: Callable[[], None]) -> None:
        """Run `work` after a pause; called in the supervisor's thread."""
        self._loop.call_later(pause_s, work)

    def watch(self, child: Child, process: Any) -> None:
        """Supervise a running child; may be called by any thread."""
        self.do(partial(self._watch, child, process))

    def start(self, child: Child) -> None:
        """Start a child now, or once the children on the same device are ready or have failed; by any thread."""
        self.do(partial(self._start, child))

    def close(self) -> None:
        """Stop starting and watching children. The caller must end the children and then call `join`."""
        self._closing.set()
        idle = threading.Event()
        self.do(idle.set)
        idle.wait()

    def abandon(self) -> None:
        """Watch and start nothing any more, without waiting; any thread may call this, also the supervisor's own."""
        self._closing.set()
        self.do(self._loop.stop)

    def join(self) -> None:
        """End the threads. Children that the supervisor's thread started end with it."""
        self.do(self._loop.stop)
        self._thread.join()
        for wait in self._waits:
            wait.join()

    def _run(self) -> None:
        try:
            self._loop.run_forever()  # logs errors of callbacks
        finally:
            self._loop.close()

    def _watch(self, child: Child, process: Any) -> None:
        self._loop.add_reader(process.sentinel, self._ended, child, process)

    def _ended(self, child: Child, process: Any) -> None:
        self._loop.remove_reader(process.sentinel)
        if not self._closing.is_set():  # on closing, the caller ends and joins them
            process.join()
            self._failed(child, Exited(process.exitcode))

    def _start(self, child: Child) -> None:
        self._starting[child.name] = child
        for name in self._turns.enter(child.name):
            self._begin(self._starting.pop(name))

    def _start_others(self, child: Child) -> None:
        """The start of a child is over: start the children whose turn follows."""
        for name in self._turns.leave(child.name):
            self.do(partial(self._begin, self._starting.pop(name)))

    def _begin(self, child: Child) -> None:
        if self._closing.is_set():
            return
        try:
            process = child.start()
        except Exception as error:
            self._failed(child, error)
            return
        wait = threading.Thread(target=self._wait, args=(child, process), name=f"omni-start-{child.name}", daemon=True)
        self._waits = [*(thread for thread in self._waits if thread.is_alive()), wait]
        wait.start()

    def _wait(self, child: Child, process: Any) -> None:
        try:
            child.wait_ready()
        except Exception as error:  # vLLM's errors too: the child must not be lost with this thread
            self.do(partial(self._failed, child, error))
        else:
            self.do(partial(self._ready, child, process))

    def _ready(self, child: Child, process: Any) -> None:
        if not self._closing.is_set():
            self._start_others(child)
            self._watch(child, process)
            child.ready(process)

    def _failed(self, child: Child, error: Exception) -> None:
        if not self._closing.is_set():
            self._start_others(child)
            pause = child.ended(error)
            if pause is not None:
                self.after(pause, partial(self._start, child))


class RestartPolicy:
    """Restart policy of one process, with a limit of failures per window.

    Args:
        limit: failures within the window after which the process is restarted; 0: no restarts.
        window_s: failures older than this are not counted, in seconds.
        backoff_s: pause before the first restart in a window; doubles with every further restart.
    """

    def __init__(self, *, limit: int, window_s: float, backoff_s: float) -> None:
        self._limit = limit
        self._window = window_s
        self._backoff = backoff_s
        self._failures: deque[float] = deque()
        self.count = 0
        """Restarts so far, including those outside the window."""

    def failed(self, at: float) -> float | None:
        """Record a failure. Returns the pause before the restart, in seconds; None: no restart.

        Args:
            at: monotonic seconds.
        """
        while self._failures and self._failures[0] <= at - self._window:
            self._failures.popleft()
        if len(self._failures) >= self._limit:
            return None
        pause = min(LONGEST_PAUSE_S, self._backoff * 2.0 ** min(len(self._failures), DOUBLINGS))
        self._failures.append(at)
        self.count += 1
        return pause


def restarts_of(config: OmniConfig) -> RestartPolicy:
    """The restart policy of one process, with the limit of the configuration."""
    return RestartPolicy(limit=config.restart_limit, window_s=RESTART_WINDOW_S, backoff_s=RESTART_BACKOFF_S)


class RestartTotals:
    """Restarts of the replicas of each name since the deployment started.

    A replica reports its own count, which begins at 0 on another host: the counts of one name are added up.
    """

    def __init__(self) -> None:
        self.by_name: dict[ReplicaId, int] = {}
        self._reported: dict[ReplicaId, int] = {}

    def add(self, replica: ReplicaId, reported: int) -> int:
        """Add a replica's own count. Returns the total of its name."""
        before = self._reported.get(replica, 0)
        self._reported[replica] = reported
        more = reported - before if reported >= before else reported
        self.by_name[replica] = self.by_name.get(replica, 0) + more
        return self.by_name[replica]
