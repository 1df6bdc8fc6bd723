"""The supervisor reports the end of processes; these are forked."""

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

from vllm_omni_ext.runtime.supervise.process_watcher import Child, ChildSupervisor
from vllm_omni_ext.topology.placement import Turns

pytestmark = pytest.mark.engine
FORK = multiprocessing.get_context("fork")
DEADLINE_S = 30
Start = Callable[..., BaseProcess]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[BaseProcess] = []

    def run(target: Callable[..., Any], *args: Any) -> BaseProcess:
        started.append(FORK.Process(target=target, args=args, daemon=True))
        started[-1].start()
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.join()


@pytest.fixture
def supervisor() -> Iterator[ChildSupervisor]:
    made = ChildSupervisor(Turns({}))
    yield made
    made.close()
    made.join()


def wait_for_ever() -> None:
    threading.Event().wait(30)  # should the tests be cut short


class Seen:
    """Collects the reports of the supervisor."""

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


@pytest.mark.parametrize(("how", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, -15)])
def test_a_killed_process_is_reported_and_the_others_are_not(
    start: Start, supervisor: ChildSupervisor, how: int, code: int
) -> None:
    processes, seen = {name: start(wait_for_ever) for name in ("a", "b", "c")}, Seen()
    for name, process in processes.items():
        supervisor.watch(seen.child(name), process)
    for name in ("b", "a"):
        os.kill(processes[name].pid or 0, how)
        assert seen.next() == (name, code)
    assert seen.reports.empty() and seen.threads == {"omni-supervisor"}
    assert processes["c"].is_alive()


def test_a_process_that_ends_by_itself_is_reported_with_its_code(start: Start, supervisor: ChildSupervisor) -> None:
    """Also one that has ended before it is watched, and the next one of the same name."""
    seen, other = Seen(), start(wait_for_ever)
    supervisor.watch(seen.child("other"), other)
    for code in (3, 0, 5):
        process = start(os._exit, code)
        if code == 0:
            process.join(DEADLINE_S)
        supervisor.watch(seen.child(("talker", 1)), process)
        assert seen.next() == (("talker", 1), code)
    assert other.is_alive()


@pytest.mark.parametrize("abandoned", [False, True])
def test_no_process_is_reported_after_the_end(start: Start, abandoned: bool) -> None:
    """`abandon` is called in the supervisor's own thread, as the garbage collector may do."""
    process, seen, threads = start(wait_for_ever), Seen(), set(threading.enumerate())
    supervisor, done = ChildSupervisor(Turns({})), threading.Event()
    supervisor.watch(seen.child("a"), process)
    if abandoned:
        supervisor.do(lambda: (supervisor.abandon(), done.set()))  # type: ignore[func-returns-value]
        assert done.wait(DEADLINE_S)
    else:
        supervisor.close()
    process.kill()
    process.join(DEADLINE_S)
    supervisor.join()
    assert seen.reports.empty()
    assert set(threading.enumerate()) <= threads
