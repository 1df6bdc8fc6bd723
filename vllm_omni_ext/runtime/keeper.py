"""Keeps replicas running: one that has ended is started again, after a pause and within limits.

Everything is decided in one thread, to which others hand what happened. Waiting for a replica to be ready takes a
thread of its own, so that several can start at once; those that share a CUDA device take turns.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from vllm_omni_ext.errors import OmniError
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.runtime.fleet import About
from vllm_omni_ext.runtime.launcher import Deployment
from vllm_omni_ext.runtime.restarts import Restarts
from vllm_omni_ext.topology.turns import Turns

log = logging.getLogger(__name__)

Addresses = Sequence[tuple[str, str]]
"""Where a replica connects to, for each API server: for its input, for its output."""


class Final(OmniError):
    """Trying again would not help."""


class Users(Protocol):
    """Those who send requests to the replicas."""

    def listen(self, replica: ReplicaId) -> Addresses:
        """Listen for a replica that is going to start; OmniError or OSError if that cannot be."""

    def ready(self, replica: ReplicaId, about: About) -> None:
        """A replica that was listened for can be used."""

    def ended(self, replica: ReplicaId, reason: str, *, again: bool) -> None:
        """A replica is gone; `again` if it will be started once more."""


class Keeper:
    """Owns what happens to the replicas of a deployment after its start.

    Args:
        host: this machine's name or address, for people.
        tell: takes lines for the person who started the deployment.
        watch: given the process of a replica that was started again; `ended` must be called when it ends.
        leave: called in the keeper's thread with every replica that has ended.
        given_up: called in the keeper's thread with every replica that is not started again.
    """

    def __init__(
        self,
        deployment: Deployment,
        users: Users,
        *,
        host: str,
        tell: Callable[[str], None],
        watch: Callable[[ReplicaId, Any], None],
        leave: Callable[[ReplicaId], None] = lambda replica: None,
        given_up: Callable[[ReplicaId], None] = lambda replica: None,
    ) -> None:
        config = deployment.plan.config
        self._deployment = deployment
        self._users = users
        self._host = host
        self._tell = tell
        self._watch = watch
        self._leave = leave
        self._given_up = given_up
        self._restarts = {
            replica: Restarts(
                limit=config.restart_limit, window_s=config.restart_window_s, backoff_s=config.restart_backoff_s
            )
            for replica in (each.id for each in deployment.plan.replicas())
        }
        self._turns = Turns({each.id: each.devices for each in deployment.plan.replicas()})
        self._todo: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._closing = threading.Event()
        self._waits: list[threading.Thread] = []
        self._thread = threading.Thread(target=self._work, name="omni-keeper", daemon=True)
        self._thread.start()

    def do(self, work: Callable[[], None]) -> None:
        """Have something done in the keeper's thread."""
        self._todo.put(work)

    def after(self, pause_s: float, work: Callable[[], None]) -> None:
        """Have something done after a pause; call it in the keeper's thread."""
        heapq.heappush(self._later, (time.monotonic() + pause_s, next(self._numbers), work))

    def start(self, replica: ReplicaId) -> None:
        """Have a replica started that has not run yet."""
        self.do(lambda: self._start(replica))

    def ended(self, replica: ReplicaId, exitcode: int | None) -> None:
        """A replica's process has ended; called by the supervisor."""
        self.do(lambda: self._failed(replica, f"its process ended with exit code {exitcode}"))

    def close(self) -> None:
        """Start nothing any more. The replicas must be ended by the caller, who then calls `join`."""
        self._closing.set()
        idle = threading.Event()
        self._todo.put(idle.set)
        idle.wait()

    def join(self) -> None:
        """End the threads. Replicas that were started by the keeper's end with it."""
        self._todo.put(None)
        self._thread.join()
        for wait in self._waits:
            wait.join()

    def _work(self) -> None:
        while True:
            work = self._next()
            if work is None:
                return
            try:
                work()
            except Exception:  # a bug here must not be the end of all later restarts
                log.exception("a replica could not be looked after")

    def _next(self) -> Callable[[], None] | None:
        """Wait for what is to be done next; what is due comes before what was handed in."""
        wait = self._later[0][0] - time.monotonic() if self._later else None
        if wait is None or wait > 0:
            try:
                return self._todo.get(timeout=wait)
            except queue.Empty:
                pass  # it is due now
        return heapq.heappop(self._later)[2]

    def _failed(self, replica: ReplicaId, reason: str, *, final: bool = False) -> None:
        if self._closing.is_set():
            return
        pause = None if final else self._restarts[replica].failed(time.monotonic())
        self._users.ended(replica, reason, again=pause is not None)
        self._leave(replica)
        tail = self._deployment.logs.tail(replica)
        self._deployment.discard(replica)
        self._start_others(replica)
        if pause is None:
            self._given_up(replica)
            why = "" if final else " (restart_limit)"
            self._tell(f"error: replica {replica} is gone: {reason}; it is not started again{why}; {tail}")
            return
        self.after(pause, lambda: self._start(replica))  # first: telling fails where nobody listens any more
        self._tell(f"error: replica {replica} is gone: {reason}; it is started again in {pause:g} s; {tail}")

    def _start(self, replica: ReplicaId) -> None:
        """Start a replica now, or once those that share a device with it are ready or have failed."""
        for each in self._turns.enter(replica):
            self._begin(each)

    def _start_others(self, replica: ReplicaId) -> None:
        """The start of a replica is over: those that have waited for it have their turn."""
        for each in self._turns.leave(replica):
            self.do(partial(self._begin, each))

    def _begin(self, replica: ReplicaId) -> None:
        if self._closing.is_set():
            return
        try:
            addresses = self._users.listen(replica)
        except (OmniError, OSError) as error:
            self._failed(replica, str(error), final=isinstance(error, Final))
            return
        if self._closing.is_set():
            return
        try:
            self._deployment.start_again(replica, addresses)
        except Exception as error:  # of vLLM's or the system's: no memory, no process, a file that is gone
            log.exception("replica %s cannot be started", replica)
            self._failed(replica, f"it cannot be started: {error}")
            return
        wait = threading.Thread(target=self._wait, args=(replica,), name=f"omni-start-{replica}", daemon=True)
        self._waits = [thread for thread in self._waits if thread.is_alive()]
        self._waits.append(wait)
        wait.start()

    def _wait(self, replica: ReplicaId) -> None:
        try:
            self._deployment.wait_for(replica)
        except Exception as error:  # also what vLLM raises: this thread's end must not be the replica's
            reason = str(error)
            self.do(lambda: self._failed(replica, reason))
            return
        self.do(lambda: self._ready(replica))

    def _ready(self, replica: ReplicaId) -> None:
        if self._closing.is_set():
            return
        self._start_others(replica)
        process = self._deployment.processes()[replica]
        restarts = self._restarts[replica].count
        self._users.ready(replica, About(host=self._host, pid=process.pid, restarts=restarts))
        self._watch(replica, process)
        self._tell(f"replica {replica} is up" + (" again" if restarts else ""))
