"""Replicas that end are started again, whatever goes wrong meanwhile; nothing is started once it is over."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_omni_ext.config.schema import OmniConfig
from vllm_omni_ext.errors import OmniError
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.runtime.client.replica_connections import ReplicaInfo
from vllm_omni_ext.runtime.supervise.process_watcher import Exited, Final
from vllm_omni_ext.runtime.supervise.replica_supervisor import ReplicaSupervisor

A, B, C = (ReplicaId("talker", i) for i in range(3))
ALL = (A, B, C)
DEADLINE_S = 5.0
BACKOFF_S = 0.01
ADDRESSES = [("in", "out")]


class Deployment:
    """Starts nothing: `started` has every start, and a start is over when the test says how."""

    def __init__(self, devices: Mapping[ReplicaId, tuple[int, ...]] | None = None, **config: Any) -> None:
        self.plan = SimpleNamespace(
            config=OmniConfig(**{"restart_backoff_s": BACKOFF_S, **config}),
            replicas=lambda: [SimpleNamespace(id=replica, devices=(devices or {}).get(replica, ())) for replica in ALL],
        )
        self.names: dict[ReplicaId, ReplicaId] = {}
        self.logs = SimpleNamespace(tail=lambda replica: f"log of {replica}")
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
    """Takes down what it is told; `refusals` are raised by the next calls of `listen`."""

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


class Watched(dict[Any, Any]):
    """Tells which children are watched from now on."""

    def __init__(self, told: queue.Queue[tuple[ReplicaId, Any]]) -> None:
        super().__init__()
        self._told = told

    def __setitem__(self, sentinel: Any, watched: tuple[Any, Any]) -> None:
        child, process = watched
        self._told.put((child.name, process))


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
        self.replica_supervisor._watched = Watched(self.watched)

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
        """Wait until the keeper has done what it was handed."""
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


def test_a_replica_that_ends_is_started_again(bench: Bench) -> None:
    bench.ended(A, -9)
    assert bench.told() == ("ended", A, "its process was killed by SIGKILL", True)
    assert bench.started() == (A, ADDRESSES)
    assert (bench.left, bench.deployment.discarded) == ([A], [A])
    bench.deployment.settle(A)
    assert bench.told() == ("ready", A, ReplicaInfo(host="here", pid=100, restarts=1))
    assert bench.watched.get(timeout=DEADLINE_S)[1].pid == 100
    bench.idle()
    first, second = bench.lines
    assert "talker/0 is gone" in first and "killed by SIGKILL" in first and "log of talker/0" in first
    assert second == "replica talker/0 is up again"


def test_lines_name_a_replica_as_the_head_does(bench: Bench) -> None:
    bench.deployment.names[A] = ReplicaId("talker", 7)
    bench.ended(A, 1)
    bench.started()
    bench.deployment.settle(A)
    assert [bench.told()[1] for _ in range(2)] == [A, A]
    bench.idle()
    first, second = bench.lines
    assert "replica talker/7 is gone: its process ended with exit code 1; " in first and "log of talker/7" in first
    assert second == "replica talker/7 is up again"


def test_a_replica_that_has_not_run_yet_is_started(bench: Bench) -> None:
    bench.start(A)
    assert bench.started() == (A, ADDRESSES)
    bench.deployment.settle(A)
    assert bench.told() == ("ready", A, ReplicaInfo(host="here", pid=100, restarts=0))
    assert bench.watched.get(timeout=DEADLINE_S)[0] == A
    bench.idle()
    assert bench.lines == ["replica talker/0 is up"]


def test_death_while_starting_is_a_failure_like_any_other(bench: Bench) -> None:
    bench.start(A)
    bench.started()
    bench.deployment.settle(A, OmniError("it was not ready after 1 s"))
    assert bench.told() == ("ended", A, "it was not ready after 1 s", True)
    bench.started()
    bench.deployment.settle(A, RuntimeError("vLLM's own"))
    assert bench.told() == ("ended", A, "vLLM's own", True)
    bench.started()
    bench.deployment.settle(A)
    assert bench.told()[:2] == ("ready", A)
    assert bench.watched.get(timeout=DEADLINE_S)[0] == A
    assert bench.watched.empty()


def test_pauses_grow(bench: Bench) -> None:
    begun = time.monotonic()
    for _ in range(4):
        bench.ended(A, 1)
        bench.told()
        bench.started()
        bench.deployment.settle(A)
        bench.told()
    assert time.monotonic() - begun >= BACKOFF_S * (1 + 2 + 4 + 8)


def test_after_too_many_failures_it_is_given_up() -> None:
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


def test_users_that_cannot_listen_are_asked_again(bench: Bench) -> None:
    bench.users.refusals = [OmniError("no head answers"), OSError("no port is free")]
    bench.start(A)
    assert bench.told() == ("ended", A, "no head answers", True)
    assert bench.told() == ("ended", A, "no port is free", True)
    assert bench.started() == (A, ADDRESSES)


def test_permanent_startup_errors_are_not_retried(bench: Bench) -> None:
    bench.users.refusals = [Final("the model is another one")]
    bench.start(A)
    assert bench.told() == ("ended", A, "the model is another one", False)
    bench.idle()
    assert bench.given_up == [A] and bench.deployment.started.empty()
    assert "not started again; log" in bench.lines[-1]


def test_a_process_that_cannot_be_made_is_tried_again(bench: Bench) -> None:
    bench.deployment.cannot_start = BlockingIOError("no more processes")
    bench.start(A)
    bench.started()
    assert bench.told() == ("ended", A, "it cannot be started: no more processes", True)
    assert bench.started() == (A, ADDRESSES)


def test_failing_status_listener_does_not_stop_restarts() -> None:
    def tell(line: str) -> None:
        raise BrokenPipeError

    bench = Bench(tell)
    bench.ended(A, -9)
    bench.told()
    assert bench.started()[0] == A
    bench.deployment.settle(A)
    assert bench.told()[0] == "ready"
    assert bench.watched.get(timeout=DEADLINE_S)[0] == A
    bench.close()


def test_those_that_share_a_device_start_one_after_the_other() -> None:
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


def test_a_start_that_fails_makes_room_for_the_next_one() -> None:
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


def test_several_start_at_once(bench: Bench) -> None:
    for replica in (A, B, C):
        bench.ended(replica, -9)
    assert {bench.started()[0] for _ in range(3)} == {A, B, C}
    assert [bench.told()[:2] for _ in range(3)] == [("ended", replica) for replica in (A, B, C)]
    for replica in (C, A, B):
        bench.deployment.settle(replica)
        assert bench.told()[:2] == ("ready", replica)
    assert {bench.watched.get(timeout=DEADLINE_S)[0] for _ in range(3)} == {A, B, C}


def test_a_bug_in_one_thing_to_do_is_not_the_end_of_others(bench: Bench) -> None:
    def fail() -> None:
        raise KeyError("bug")

    bench.replica_supervisor.do(fail)
    bench.idle()


def test_due_restarts_run_while_new_events_keep_coming(bench: Bench) -> None:
    due = threading.Event()

    def again() -> None:
        if not due.is_set():
            bench.replica_supervisor.do(again)

    bench.replica_supervisor.do(again)
    bench.replica_supervisor.do(lambda: bench.replica_supervisor.after(0.0, due.set))
    assert due.wait(DEADLINE_S)


def test_things_are_done_in_the_order_in_which_they_are_due(bench: Bench) -> None:
    done: queue.Queue[int] = queue.Queue()

    def plan() -> None:
        for number, pause in ((3, 0.03), (1, 0.01), (2, 0.01)):
            bench.replica_supervisor.after(pause, lambda number=number: done.put(number))  # type: ignore[misc]

    bench.replica_supervisor.do(plan)
    assert [done.get(timeout=DEADLINE_S) for _ in range(3)] == [1, 2, 3]


# -- the end at any moment -------------------------------------------------------------------------


def test_nothing_is_started_after_the_end(bench: Bench) -> None:
    bench.replica_supervisor.close()
    bench.ended(A, -9)
    bench.start(B)
    bench.idle()
    assert bench.deployment.started.empty() and bench.users.told.empty() and bench.lines == []


def test_the_end_during_a_pause() -> None:
    bench, begun = Bench(restart_backoff_s=60.0), time.monotonic()
    bench.ended(A, -9)
    bench.told()
    bench.close()
    assert bench.deployment.started.empty()
    assert time.monotonic() - begun < DEADLINE_S, "the pause is not waited for"


def test_the_end_while_users_are_asked_to_listen() -> None:
    bench, asked, go_on = Bench(), threading.Event(), threading.Event()

    def listen(replica: ReplicaId) -> list[tuple[str, str]]:
        asked.set()
        assert go_on.wait(DEADLINE_S)
        return ADDRESSES

    bench.users.listen = listen
    bench.start(A)
    assert asked.wait(DEADLINE_S)
    closing = threading.Thread(target=bench.replica_supervisor.close)
    closing.start()
    while not bench.replica_supervisor._closing.is_set():
        time.sleep(0.1)
    go_on.set()
    closing.join(DEADLINE_S)
    assert not closing.is_alive() and bench.deployment.started.empty()
    bench.close()


@pytest.mark.parametrize("error", [None, OmniError("ended")])
def test_the_end_while_a_replica_starts(error: Exception | None) -> None:
    """It is ended by the caller: neither its death nor that it was ready before is news."""
    bench = Bench()
    bench.start(A)
    bench.started()
    bench.replica_supervisor.close()
    bench.deployment.settle(A, error)
    bench.replica_supervisor.join()
    assert bench.users.told.empty() and bench.watched.empty() and bench.lines == []


def test_no_thread_is_left() -> None:
    before = set(threading.enumerate())
    bench = Bench()
    bench.start(A)
    bench.started()
    bench.close()
    assert set(threading.enumerate()) <= before
