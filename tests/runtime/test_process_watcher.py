"""Processes that end are noticed; real ones, forked."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from typing import Any

import pytest

from vllm_omni_ext.runtime.supervise.process_watcher import Child, ChildSupervisor, Exited
from vllm_omni_ext.topology.turns import Turns

pytestmark = pytest.mark.engine
FORK = multiprocessing.get_context("fork")
DEADLINE_S = 5
Start = Callable[..., BaseProcess]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a process; all are killed after the test."""
    started: list[BaseProcess] = []

    def run(target: Callable[..., Any], *args: Any) -> BaseProcess:
        started.append(FORK.Process(target=target, args=args, daemon=True))
        started[-1].start()
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.join()


def wait_for_ever() -> None:
    threading.Event().wait(30)  # should the tests be cut short


class Seen:
    """Collects what the supervisor reports."""

    def __init__(self) -> None:
        self.reports: queue.Queue[tuple[Any, int | None]] = queue.Queue()
        self.threads: set[str] = set()

    def child(self, name: Any) -> Child:
        def ended(error: Any) -> None:
            self.threads.add(threading.current_thread().name)
            self.reports.put((name, error.exitcode))

        return Child(name, start=lambda: None, ended=ended)

    def next(self) -> tuple[Any, int | None]:
        return self.reports.get(timeout=DEADLINE_S)


class ProcessWatcher:
    """Watches processes and reports their ends to `seen`."""

    def __init__(self, processes: dict[Any, BaseProcess], seen: Seen) -> None:
        self._seen = seen
        self._process_watcher = ChildSupervisor(Turns({}))
        for name, process in processes.items():
            self.watch(name, process)

    def watch(self, name: Any, process: BaseProcess) -> None:
        self._process_watcher.watch(self._seen.child(name), process)

    def stop(self) -> None:
        self._process_watcher.close()
        self._process_watcher.join()


@pytest.mark.parametrize(("how", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, -15)])
def test_a_killed_process_is_reported_and_the_others_are_not(start: Start, how: int, code: int) -> None:
    processes, seen = {name: start(wait_for_ever) for name in ("a", "b", "c")}, Seen()
    process_watcher = ProcessWatcher(processes, seen)
    os.kill(processes["b"].pid or 0, how)
    assert seen.next() == ("b", code)
    os.kill(processes["a"].pid or 0, how)
    assert seen.next() == ("a", code)
    process_watcher.stop()
    assert seen.reports.empty()
    assert seen.threads == {"omni-supervisor"}
    assert processes["c"].is_alive()


@pytest.mark.parametrize("code", [0, 3])
def test_a_process_that_ends_by_itself_is_reported_with_its_code(start: Start, code: int) -> None:
    seen = Seen()
    process_watcher = ProcessWatcher({("talker", 1): start(os._exit, code)}, seen)
    assert seen.next() == (("talker", 1), code)
    process_watcher.stop()


def test_a_process_that_ended_before_is_reported_too(start: Start) -> None:
    process, seen = start(os._exit, 7), Seen()
    process.join(DEADLINE_S)
    process_watcher = ProcessWatcher({"early": process}, seen)
    assert seen.next() == ("early", 7)
    process_watcher.stop()


def test_all_at_once(start: Start) -> None:
    processes, seen = {i: start(wait_for_ever) for i in range(5)}, Seen()
    process_watcher = ProcessWatcher(processes, seen)
    for process in processes.values():
        process.kill()
    assert sorted(seen.next() for _ in processes) == [(i, -9) for i in processes]
    process_watcher.stop()


def test_one_more_is_watched(start: Start) -> None:
    seen, first, second = Seen(), start(wait_for_ever), start(wait_for_ever)
    process_watcher = ProcessWatcher({"a": first}, seen)
    process_watcher.watch("b", second)
    second.kill()
    assert seen.next() == ("b", -9)
    first.kill()
    assert seen.next() == ("a", -9)
    process_watcher.stop()


def test_one_that_ended_before_it_was_watched_is_reported(start: Start) -> None:
    process, seen = start(os._exit, 7), Seen()
    process.join(DEADLINE_S)
    process_watcher = ProcessWatcher({}, seen)
    process_watcher.watch("late", process)
    assert seen.next() == ("late", 7)
    process_watcher.stop()


def test_a_name_may_be_watched_again_and_again(start: Start) -> None:
    """As a replica is that ends and is started again; one of many."""
    seen, others = Seen(), {i: start(wait_for_ever) for i in range(3)}
    process_watcher = ProcessWatcher(others, seen)
    for code in (3, 4, 5):
        process_watcher.watch(7, start(os._exit, code))
        assert seen.next() == (7, code)
    process_watcher.stop()
    assert all(process.is_alive() for process in others.values())


def test_many_are_watched_at_once(start: Start) -> None:
    seen = Seen()
    process_watcher = ProcessWatcher({}, seen)
    processes = {i: start(wait_for_ever) for i in range(8)}
    threads = [threading.Thread(target=process_watcher.watch, args=each) for each in processes.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for process in processes.values():
        process.kill()
    assert sorted(seen.next() for _ in processes) == [(i, -9) for i in processes]
    process_watcher.stop()


def test_nothing_is_reported_after_the_stop(start: Start) -> None:
    process, seen, threads = start(wait_for_ever), Seen(), set(threading.enumerate())
    process_watcher = ProcessWatcher({"a": process}, seen)
    assert set(threading.enumerate()) > threads
    process_watcher.stop()
    process.kill()
    process.join(DEADLINE_S)
    assert seen.reports.empty()
    assert set(threading.enumerate()) <= threads


def test_nothing_is_reported_once_it_is_abandoned(start: Start) -> None:
    """By whoever: the garbage collector may do it in the supervisor's own thread."""
    process, seen, own = start(wait_for_ever), Seen(), queue.Queue()  # type: ignore[var-annotated]
    supervisor = ChildSupervisor(Turns({}))
    supervisor.watch(seen.child("a"), process)
    supervisor.do(lambda: own.put(supervisor.abandon()))
    assert own.get(timeout=DEADLINE_S) is None
    process.kill()
    process.join(DEADLINE_S)
    supervisor.join()
    assert seen.reports.empty()


def test_with_nothing_to_watch_it_can_be_stopped() -> None:
    ProcessWatcher({}, Seen()).stop()


def test_what_ends_or_cannot_start_is_started_again_until_it_is_given_up(start: Start) -> None:
    told: queue.Queue[Any] = queue.Queue()
    plans: list[Any] = [OSError("no process"), RuntimeError("not ready"), None]
    processes: queue.Queue[BaseProcess] = queue.Queue()

    def begin() -> BaseProcess:
        if isinstance(plans[0], OSError):
            raise plans.pop(0)
        processes.put(start(wait_for_ever))
        return processes.queue[-1]

    def wait_ready() -> None:
        if (error := plans.pop(0)) is not None:
            raise error

    def ended(error: Exception) -> float | None:
        told.put(str(error))
        return None if isinstance(error, Exited) else 0.0

    process_watcher = ChildSupervisor(Turns({}))
    process_watcher.start(Child("a", start=begin, wait_ready=wait_ready, ready=told.put, ended=ended))
    assert told.get(timeout=DEADLINE_S) == "no process"
    assert told.get(timeout=DEADLINE_S) == "not ready"
    process = told.get(timeout=DEADLINE_S)
    process.kill()
    assert told.get(timeout=DEADLINE_S) == "its process was killed by SIGKILL"
    process_watcher.close()
    process_watcher.join()
    assert processes.qsize() == 2 and told.empty()
