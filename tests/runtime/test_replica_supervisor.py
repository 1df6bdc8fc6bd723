"""Replicas that end are started again after any failure; no replica is started after the end."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_omni_ext.config.schema import OmniConfig
from vllm_omni_ext.errors import OmniError
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.runtime.client.replica_connections import ReplicaInfo
from vllm_omni_ext.runtime.supervise import process_watcher
from vllm_omni_ext.runtime.supervise.process_watcher import Exited, Final, ReplicaSupervisor

A, B, C = (ReplicaId("talker", i) for i in range(3))
ALL = (A, B, C)
DEADLINE_S = 30.0
BACKOFF_S = 0.01
ADDRESSES = [("in", "out")]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_watcher, "RESTART_BACKOFF_S", BACKOFF_S)


class Deployment:
    """Starts no process: `started` has every start, and `settle` ends it."""

    def __init__(self, devices: Mapping[ReplicaId, tuple[int, ...]] | None = None, **config: Any) -> None:
        self.plan = SimpleNamespace(
            config=OmniConfig(**config),
            replicas=lambda: [SimpleNamespace(id=replica, devices=(devices or {}).get(replica, ())) for replica in ALL],
        )
        self.names: dict[ReplicaId, ReplicaId] = {}
        self.logs = SimpleNamespace(tail=lambda replica: f"log of {replica}", path=lambda replica: None)
        self.started: queue.Queue[tuple[ReplicaId, Any]] = queue.Queue()
        self.discarded: list[ReplicaId] = []
        self.cannot_start: Exception | None = None
        self._outcomes: dict[ReplicaId, queue.Queue[Exception | None]] = {r: queue.Queue() for r in (A, B, C)}
        self._pids = iter(range(100, 1000))
        self._processes: dict[ReplicaId, Any] = {}
        self._never_ready = socket.socketpair()

    def name_of(self, replica: ReplicaId) -> ReplicaId:
        return self.names.get(replica, replica)

    def start_again(self, replica: ReplicaId, addresses: Any) -> None:
        self.started.put((replica, addresses))
        if self.cannot_start is not None:
            error, self.cannot_start = self.cannot_start, None
            raise error
        self._processes[replica] = SimpleNamespace(pid=next(self._pids), sentinel=self._never_ready[0])

    def wait_for(self, replica: ReplicaId) -> None:
        outcome = self._outcomes[replica].get(timeout=DEADLINE_S)
        if outcome is not None:
            raise outcome

    def settle(self, replica: ReplicaId, error: Exception | None = None) -> None:
        self._outcomes[replica].put(error)

    def discard(self, replica: ReplicaId) -> None:
        self.discarded.append(replica)

    def processes(self) -> dict[ReplicaId, Any]:
        return self._processes


class ReplicaListener:
    """Logs messages; `refusals` are raised by the next calls of `listen`."""

    def __init__(self) -> None:
        self.told: queue.Queue[tuple[Any, ...]] = queue.Queue()
        self.refusals: list[Exception] = []

    def listen(self, replica: ReplicaId) -> list[tuple[str, str]]:
        if self.refusals:
            raise self.refusals.pop(0)
        return ADDRESSES

    def ready(self, replica: ReplicaId, about: ReplicaInfo) -> None:
        self.told.put(("ready", replica, about))

    def ended(self, replica: ReplicaId, reason: str, *, again: bool) -> None:
        self.told.put(("ended", replica, reason, again))


class Bench:
    def __init__(self, tell: Callable[[str], None] | None = None, **config: Any) -> None:
        self.deployment: Any = Deployment(**config)
        self.users: Any = ReplicaListener()
        self.lines: list[str] = []
        self.watched: queue.Queue[tuple[ReplicaId, Any]] = queue.Queue()
        self.left: list[ReplicaId] = []
        self.given_up: list[ReplicaId] = []
        self.replica_supervisor = ReplicaSupervisor(
            self.deployment,
            self.users,
            host="here",
            tell=tell or self.lines.append,
            leave=self.left.append,
            given_up=self.given_up.append,
        )
        supervisor: Any = self.replica_supervisor
        supervisor._watch = lambda child, process: self.watched.put((child.name, process))

    def start(self, replica: ReplicaId) -> None:
        self.replica_supervisor.start(self.replica_supervisor.children[replica])

    def ended(self, replica: ReplicaId, exitcode: int) -> None:
        self.replica_supervisor.do(
            partial(self.replica_supervisor._failed, self.replica_supervisor.children[replica], Exited(exitcode))
        )

    def told(self) -> tuple[Any, ...]:
        return self.users.told.get(timeout=DEADLINE_S)

    def started(self) -> tuple[ReplicaId, Any]:
        return self.deployment.started.get(timeout=DEADLINE_S)

    def idle(self) -> None:
        """Wait until the supervisor has done its work."""
        done = threading.Event()
        self.replica_supervisor.do(done.set)
        assert done.wait(DEADLINE_S)

    def close(self) -> None:
        self.replica_supervisor.close()
        for replica in (A, B, C):  # as the caller does: replicas that were starting have been ended
            self.deployment.settle(replica, RuntimeError("ended"))
        self.replica_supervisor.join()


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


def test_a_replica_that_ends_or_does_not_start_is_started_again(bench: Bench) -> None:
    bench.deployment.names[A] = ReplicaId("talker", 7)
    bench.start(C)
    for error in (OmniError("it was not ready after 1 s"), RuntimeError("vLLM's own")):
        bench.started()
        bench.deployment.settle(C, error)
        assert bench.told() == ("ended", C, str(error), True)
    bench.started()
    bench.deployment.settle(C)
    assert bench.told() == ("ready", C, ReplicaInfo(host="here", pid=102, restarts=2))
    assert bench.watched.get(timeout=DEADLINE_S)[0] == C and bench.watched.empty()
    bench.idle()
    for log in (bench.left, bench.deployment.discarded, bench.lines):
        log.clear()
    bench.ended(A, -9)
    assert bench.told() == ("ended", A, "its process was killed by SIGKILL", True)
    assert bench.started() == (A, ADDRESSES)
    assert (bench.left, bench.deployment.discarded) == ([A], [A])
    bench.deployment.settle(A)
    assert bench.told() == ("ready", A, ReplicaInfo(host="here", pid=103, restarts=1))
    assert bench.watched.get(timeout=DEADLINE_S)[1].pid == 103
    bench.idle()
    first, second = bench.lines
    assert "talker/7 is gone" in first and "killed by SIGKILL" in first and "log of talker/7" in first
    assert second == "replica talker/7 is up again", "the name of the head"


def test_a_replica_is_not_restarted_beyond_its_limit() -> None:
    bench = Bench(restart_limit=2)
    for again in (True, True, False):
        bench.ended(A, 1)
        assert bench.told() == ("ended", A, "its process ended with exit code 1", again)
        if again:
            bench.started()
            bench.deployment.settle(A)
            bench.told()
    bench.idle()
    assert bench.given_up == [A] and "(restart_limit)" in bench.lines[-1]
    bench.ended(B, 1)
    assert bench.told()[3] is True, "each has its own limit"
    bench.close()


def test_failures_to_listen_or_to_make_a_process_are_retried_unless_they_are_final() -> None:
    def closed(line: str) -> None:
        raise BrokenPipeError

    bench = Bench(closed)  # a closed output does not stop restarts
    bench.users.refusals = [OmniError("no head answers"), OSError("no port is free")]
    bench.deployment.cannot_start = BlockingIOError("no more processes")
    bench.start(A)
    assert bench.told() == ("ended", A, "no head answers", True)
    assert bench.told() == ("ended", A, "no port is free", True)
    bench.started()
    assert bench.told() == ("ended", A, "it cannot be started: no more processes", True)
    assert bench.started() == (A, ADDRESSES)
    bench.users.refusals = [Final("the model is another one")]
    bench.start(B)
    assert bench.told() == ("ended", B, "the model is another one", False)
    bench.idle()
    assert bench.given_up == [B] and bench.deployment.started.empty()
    bench.close()


def test_replicas_that_share_a_device_start_one_after_the_other() -> None:
    bench = Bench(devices={A: (0,), B: (0, 1), C: (2,)})
    for replica in ALL:
        bench.start(replica)
    assert [bench.started()[0] for _ in range(2)] == [A, C], "B measures the memory that A is about to take"
    bench.idle()
    assert bench.deployment.started.empty()
    bench.deployment.settle(A)
    assert bench.started()[0] == B
    assert bench.told()[:2] == ("ready", A)
    bench.close()


def test_after_a_failed_start_the_next_replica_of_the_device_starts() -> None:
    bench = Bench(devices=dict.fromkeys(ALL, (0,)), restart_limit=1)
    bench.users.refusals = [Final("the model is another one")]
    for replica in ALL:
        bench.start(replica)
    assert bench.told() == ("ended", A, "the model is another one", False)
    assert bench.started()[0] == B
    bench.deployment.settle(B, OmniError("no memory"))
    assert bench.told() == ("ended", B, "no memory", True)
    assert bench.started()[0] == C, "B comes again after those that wait"
    bench.idle()
    assert bench.deployment.started.empty()
    bench.deployment.settle(C)
    assert bench.told()[:2] == ("ready", C)
    assert bench.started()[0] == B
    bench.close()


def test_due_work_is_done_in_order_while_new_work_keeps_coming_and_some_fails(bench: Bench) -> None:
    supervisor, done, over = bench.replica_supervisor, [], threading.Event()  # type: ignore[var-annotated]

    def again() -> None:
        if not over.is_set():
            supervisor.do(again)

    def plan() -> None:
        for number, pause in ((3, 0.03), (1, 0.01), (2, 0.01)):
            supervisor.after(pause, partial(done.append, number))
        supervisor.after(0.03, over.set)
        raise KeyError("bug")

    supervisor.do(again)
    supervisor.do(plan)
    assert over.wait(DEADLINE_S) and done == [1, 2, 3]


# -- the end at any moment -------------------------------------------------------------------------


def test_no_replica_is_started_after_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_watcher, "RESTART_BACKOFF_S", 60.0)
    before, bench = set(threading.enumerate()), Bench()
    bench.ended(C, -9)
    bench.told()  # its restart waits for the pause
    bench.replica_supervisor.close()
    bench.lines.clear()
    bench.ended(A, -9)
    bench.start(B)
    bench.idle()
    assert bench.deployment.started.empty() and bench.users.told.empty() and bench.lines == []
    bench.close()
    assert set(threading.enumerate()) <= before


def test_end_while_a_listener_listens_starts_no_replica() -> None:
    bench, listening, go_on = Bench(), threading.Event(), threading.Event()

    def listen(replica: ReplicaId) -> list[tuple[str, str]]:
        listening.set()
        assert go_on.wait(DEADLINE_S)
        return ADDRESSES

    bench.users.listen = listen
    bench.start(A)
    assert listening.wait(DEADLINE_S)
    bench.replica_supervisor._closing.set()
    go_on.set()
    bench.close()
    assert bench.deployment.started.empty()


@pytest.mark.parametrize("error", [None, OmniError("ended")])
def test_end_while_a_replica_starts_is_not_reported(error: Exception | None) -> None:
    bench = Bench()
    bench.start(A)
    bench.started()
    bench.replica_supervisor.close()
    bench.deployment.settle(A, error)
    bench.replica_supervisor.join()
    assert bench.users.told.empty() and bench.watched.empty() and bench.lines == []
