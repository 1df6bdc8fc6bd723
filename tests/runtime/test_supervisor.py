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

from vllm_omni_ext.runtime.supervisor import Supervisor

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

    def __call__(self, name: Any, code: int | None) -> None:
        self.threads.add(threading.current_thread().name)
        self.reports.put((name, code))

    def next(self) -> tuple[Any, int | None]:
        return self.reports.get(timeout=DEADLINE_S)


@pytest.mark.parametrize(("how", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, -15)])
def test_a_killed_process_is_reported_and_the_others_are_not(start: Start, how: int, code: int) -> None:
    processes, seen = {name: start(wait_for_ever) for name in ("a", "b", "c")}, Seen()
    supervisor = Supervisor(processes, seen)
    os.kill(processes["b"].pid or 0, how)
    assert seen.next() == ("b", code)
    os.kill(processes["a"].pid or 0, how)
    assert seen.next() == ("a", code)
    supervisor.stop()
    assert seen.reports.empty()
    assert seen.threads == {"omni-supervisor"}
    assert processes["c"].is_alive()


@pytest.mark.parametrize("code", [0, 3])
def test_a_process_that_ends_by_itself_is_reported_with_its_code(start: Start, code: int) -> None:
    seen = Seen()
    supervisor = Supervisor({("talker", 1): start(os._exit, code)}, seen)
    assert seen.next() == (("talker", 1), code)
    supervisor.stop()


def test_a_process_that_ended_before_is_reported_too(start: Start) -> None:
    process, seen = start(os._exit, 7), Seen()
    process.join(DEADLINE_S)
    supervisor = Supervisor({"early": process}, seen)
    assert seen.next() == ("early", 7)
    supervisor.stop()


def test_all_at_once(start: Start) -> None:
    processes, seen = {i: start(wait_for_ever) for i in range(5)}, Seen()
    supervisor = Supervisor(processes, seen)
    for process in processes.values():
        process.kill()
    assert sorted(seen.next() for _ in processes) == [(i, -9) for i in processes]
    supervisor.stop()


def test_one_more_is_watched(start: Start) -> None:
    seen, first, second = Seen(), start(wait_for_ever), start(wait_for_ever)
    supervisor = Supervisor({"a": first}, seen)
    supervisor.watch("b", second)
    second.kill()
    assert seen.next() == ("b", -9)
    first.kill()
    assert seen.next() == ("a", -9)
    supervisor.stop()


def test_one_that_ended_before_it_was_watched_is_reported(start: Start) -> None:
    process, seen = start(os._exit, 7), Seen()
    process.join(DEADLINE_S)
    supervisor: Supervisor[str] = Supervisor({}, seen)
    supervisor.watch("late", process)
    assert seen.next() == ("late", 7)
    supervisor.stop()


def test_a_name_may_be_watched_again_and_again(start: Start) -> None:
    """As a replica is that ends and is started again; one of many."""
    seen, others = Seen(), {i: start(wait_for_ever) for i in range(3)}
    supervisor: Supervisor[int] = Supervisor(others, seen)
    for code in (3, 4, 5):
        supervisor.watch(7, start(os._exit, code))
        assert seen.next() == (7, code)
    supervisor.stop()
    assert all(process.is_alive() for process in others.values())


def test_many_are_watched_at_once(start: Start) -> None:
    seen = Seen()
    supervisor: Supervisor[int] = Supervisor({}, seen)
    processes = {i: start(wait_for_ever) for i in range(8)}
    threads = [threading.Thread(target=supervisor.watch, args=each) for each in processes.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for process in processes.values():
        process.kill()
    assert sorted(seen.next() for _ in processes) == [(i, -9) for i in processes]
    supervisor.stop()


def test_nothing_is_reported_after_the_stop(start: Start) -> None:
    process, seen, threads = start(wait_for_ever), Seen(), set(threading.enumerate())
    supervisor = Supervisor({"a": process}, seen)
    assert set(threading.enumerate()) > threads
    supervisor.stop()
    process.kill()
    process.join(DEADLINE_S)
    assert seen.reports.empty()
    assert set(threading.enumerate()) <= threads


def test_with_nothing_to_watch_it_can_be_stopped() -> None:
    Supervisor({}, Seen()).stop()
