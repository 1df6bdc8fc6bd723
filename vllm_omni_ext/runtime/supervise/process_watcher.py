"""Restarts child processes, mainly replicas, after a pause when they have ended.

vLLM's clients do not detect the end of a killed engine, so the parent watches the processes here. All decisions are
made in one thread with an event loop. One more thread for each starting child waits until the child is ready, so that
several children can start at once. Children that share a CUDA device start one after the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from vllm_omni_ext.config.schema import OmniConfig
from vllm_omni_ext.errors import OmniError
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.lifeline import how_it_ended
from vllm_omni_ext.runtime.client.replica_connections import ReplicaInfo
from vllm_omni_ext.runtime.launch.launcher import Deployment
from vllm_omni_ext.topology.placement import Turns

RESTART_WINDOW_S, RESTART_BACKOFF_S, LONGEST_PAUSE_S = 600.0, 1.0, 30.0
"""Window in which failures are counted for `restart_limit`; first and longest pause before a restart. In seconds."""

DOUBLINGS = 64
"""Upper bound of the exponent in `RestartPolicy.failed`, against overflow; `LONGEST_PAUSE_S` is reached before."""


class Final(OmniError):
    """An error after which a process is not restarted, because a restart would not fix the error."""


class Exited(OmniError):
    """A supervised process has ended; the message contains its exit code or signal."""

    def __init__(self, exitcode: int | None) -> None:
        super().__init__(how_it_ended(exitcode))
        self.exitcode = exitcode


@dataclass(frozen=True, eq=False)
class Child:
    """A process that `ChildSupervisor` starts and restarts. All callables but `wait_ready` are called in its thread.

    Attributes:
        name: unique name of the child; that of a replica is its `ReplicaId`.
        start: starts the process and returns it; an exception is handled as the end of the process.
        ended: called with the reason (`Exited`, or the error of the start). Returns the pause before a restart in
            seconds; None: no restart.
        wait_ready: waits until the process is ready; an exception is handled as the end of the process.
        ready: called with the process once it is ready.
    """

    name: Any
    start: Callable[[], Any]
    ended: Callable[[Exception], float | None]
    wait_ready: Callable[[], None] = lambda: None
    ready: Callable[[Any], None] = lambda process: None


class ChildSupervisor:
    """Starts child processes, watches them, and restarts them after their end.

    Args:
        turns: determines the children that start one after the other, because they share a device.
        closing: once set, no child is started, and the end of children is ignored.
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
        """Run `work` in the supervisor's thread, unless the thread has ended. Any thread may call this."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(work)

    def spawn(self, work: Coroutine[Any, Any, None]) -> Future[None]:
        """Run a coroutine in the supervisor's thread. It is cancelled when the supervisor ends; its error is logged."""

        async def logged() -> None:
            try:
                await work
            except Exception:
                log.exception("a task of the supervisor failed")

        return asyncio.run_coroutine_threadsafe(logged(), self._loop)

    def after(self, pause_s: float, work: Callable[[], object]) -> None:
        """Run `work` after `pause_s` seconds. Called in the supervisor's thread."""
        self._loop.call_later(pause_s, work)

    def watch(self, child: Child, process: Any) -> None:
        """Watch the running process of a child. Any thread may call this."""
        self.do(partial(self._watch, child, process))

    def start(self, child: Child) -> None:
        """Start a child once no earlier child that shares a device with it is starting. Any thread may call this."""
        self.do(partial(self._start, child))

    def close(self) -> None:
        """Stop starting and watching children, and wait until the supervisor's thread does neither any more.

        The caller must end the children and then call `join`.
        """
        self._closing.set()
        idle = threading.Event()
        self.do(idle.set)
        idle.wait()

    def abandon(self) -> None:
        """Stop starting and watching children without waiting. Any thread may call this, also the supervisor's own."""
        self._closing.set()
        self.do(self._loop.stop)

    def join(self) -> None:
        """End the supervisor's threads. Children that the supervisor's thread has started end with the thread."""
        self.do(self._loop.stop)
        self._thread.join()
        for wait in self._waits:
            wait.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:  # cancels tasks at the end
            runner.get_loop().run_forever()  # logs errors of callbacks

    def _watch(self, child: Child, process: Any) -> None:
        self._loop.add_reader(process.sentinel, self._ended, child, process)

    def _ended(self, child: Child, process: Any) -> None:
        self._loop.remove_reader(process.sentinel)
        if not self._closing.is_set():  # on closing, the caller ends and joins the processes
            process.join()
            self._failed(child, Exited(process.exitcode))

    def _start(self, child: Child) -> None:
        self._starting[child.name] = child
        for name in self._turns.enter(child.name):
            self._begin(self._starting.pop(name))

    def _start_others(self, child: Child) -> None:
        """Start the next children on the devices of a child that is ready or has failed."""
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
        except Exception as error:  # any error of vLLM too: otherwise the supervisor would never restart the child
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
    """Computes the pause before each restart of one process, with a limit of restarts in a time window.

    Args:
        limit: most restarts within the window; 0: no restarts.
        window_s: failures older than this are not counted, in seconds.
        backoff_s: pause before the first restart in a window; doubles with every further restart.
    """

    def __init__(self, *, limit: int, window_s: float, backoff_s: float) -> None:
        self._limit = limit
        self._window = window_s
        self._backoff = backoff_s
        self._failures: deque[float] = deque()
        self.count = 0
        """All restarts so far, including those before the window."""

    def failed(self, at: float) -> float | None:
        """Record a failure. Return the pause before the restart, in seconds; None: no restart.

        Args:
            at: the current time, in monotonic seconds.
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
    """Return a restart policy for one process, with the limit `restart_limit` of the configuration."""
    return RestartPolicy(limit=config.restart_limit, window_s=RESTART_WINDOW_S, backoff_s=RESTART_BACKOFF_S)


class RestartTotals:
    """Counts the restarts of all replicas that have had the same name since the deployment started.

    A replica's host reports the count of its restarts. Another host that gets the name later begins at 0, so the counts
    of all hosts are added up.
    """

    def __init__(self) -> None:
        self.by_name: dict[ReplicaId, int] = {}
        self._reported: dict[ReplicaId, int] = {}

    def add(self, replica: ReplicaId, reported: int) -> int:
        """Add the restarts since the last report for this name. Return the total of the name.

        Args:
            reported: the count of the replica's host. If it is below the last report, another host has sent it.
        """
        before = self._reported.get(replica, 0)
        self._reported[replica] = reported
        more = reported - before if reported >= before else reported
        self.by_name[replica] = self.by_name.get(replica, 0) + more
        return self.by_name[replica]


log = logging.getLogger(__name__)

Addresses = Sequence[tuple[str, str]]
"""The addresses (input, output) of each API server to which a replica connects."""


class ReplicaListener(Protocol):
    """Receives the events of replicas from `ReplicaSupervisor`, on behalf of the API servers.

    The head's implementation is `ApiServers`. A headless node, whose replicas join a head, has `HeadClient`.
    """

    def listen(self, replica: ReplicaId) -> Addresses:
        """Open the API servers' listeners for a replica that is going to start, and return their addresses.

        Raises:
            OmniError, OSError: the listeners cannot be opened.
        """

    def ready(self, replica: ReplicaId, about: ReplicaInfo) -> None:
        """Handle a replica that is ready for requests: let the API servers connect to it."""

    def ended(self, replica: ReplicaId, reason: str, *, again: bool) -> None:
        """Handle the end of a replica's process; `again`: the process will be restarted."""


class ReplicaSupervisor(ChildSupervisor):
    """Supervises the replicas of a deployment, and other children that are passed to it.

    Args:
        users: receives the events of replicas, for the API servers.
        host: this machine's name or address, for status pages.
        tell: receives lines for the user who started the deployment.
        leave: called in the replica supervisor's thread with every replica that has ended.
        given_up: called in the replica supervisor's thread with every replica that has ended and is not restarted.
        closing: see `ChildSupervisor`.

    Attributes:
        children: the `Child` of each replica.
    """

    def __init__(
        self,
        deployment: Deployment,
        users: ReplicaListener,
        *,
        host: str,
        tell: Callable[[str], None],
        leave: Callable[[ReplicaId], None] = lambda replica: None,
        given_up: Callable[[ReplicaId], None] = lambda replica: None,
        closing: threading.Event | None = None,
    ) -> None:
        replicas = deployment.plan.replicas()
        super().__init__(Turns({each.id: each.devices for each in replicas}), closing=closing)
        self._deployment = deployment
        self._users = users
        self._host = host
        self._tell = tell
        self._leave = leave
        self._given_up = given_up
        self._restarts = {each.id: restarts_of(deployment.plan.config) for each in replicas}
        self.children = {each.id: self._child(each.id) for each in replicas}

    def watch_replicas(self) -> None:
        """Watch the replicas that `Deployment` has started already."""
        for replica, process in self._deployment.processes().items():
            self.watch(self.children[replica], process)

    def _child(self, replica: ReplicaId) -> Child:
        return Child(
            replica,
            start=partial(self._start_replica, replica),
            wait_ready=partial(self._deployment.wait_for, replica),
            ready=partial(self._replica_ready, replica),
            ended=partial(self._replica_ended, replica),
        )

    def _start_replica(self, replica: ReplicaId) -> Any:
        addresses = self._users.listen(replica)
        if self._closing.is_set():
            raise Final("the deployment is shutting down")
        try:
            self._deployment.start_again(replica, addresses)
        except Exception as error:  # raised by vLLM or the system: no memory, no process, a missing file
            log.exception("replica %s cannot be started", replica)
            raise OmniError(f"it cannot be started: {error}") from error
        return self._deployment.processes()[replica]

    def _replica_ready(self, replica: ReplicaId, process: Any) -> None:
        restarts = self._restarts[replica].count
        self._users.ready(replica, ReplicaInfo(host=self._host, pid=process.pid, restarts=restarts))
        self._tell(f"replica {self._deployment.name_of(replica)} is up" + (" again" if restarts else ""))

    def _replica_ended(self, replica: ReplicaId, error: Exception) -> float | None:
        final = isinstance(error, Final)
        pause = None if final else self._restarts[replica].failed(time.monotonic())
        name = self._deployment.name_of(replica)
        log = self._deployment.logs.path(name)
        reason = str(error) if log is None or final else f"{error} (log: {log})"
        self._users.ended(replica, reason, again=pause is not None)
        self._leave(replica)
        tail = self._deployment.logs.tail(name)
        self._deployment.discard(replica)
        then = f"it is started again in {pause:g} s" if pause is not None else "it is not started again"
        if pause is None:
            self._given_up(replica)
            then += "" if final else " (restart_limit)"
        with contextlib.suppress(OSError):  # the output may be closed
            self._tell(f"error: replica {name} is gone: {error}; {then}; {tail}")
        return pause
