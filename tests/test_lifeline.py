"""A process ends with its parent; processes are ended within a limit."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.pace import pace
from vllm_omni_ext.lifeline import (
    die_with_parent,
    end_on_signals,
    end_processes,
    exit_on_signals,
    how_it_ended,
    leave_interrupts_to_parent,
)

pytestmark = [pytest.mark.engine, pytest.mark.skipif(sys.platform != "linux", reason="prctl(2)")]
FORK = multiprocessing.get_context("fork")
NO_PROCESS = 2**22 + 1
"""No process id on Linux."""


def forked(body: Callable[[], None]) -> int:
    """Run something in a child, which ends without cleaning up."""
    pid = os.fork()
    if pid == 0:
        try:
            body()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return pid


def test_a_child_ends_when_its_parent_is_killed() -> None:
    """The grandchild holds the writing end of a pipe: it is closed when the last of both is gone."""
    readable, writable = os.pipe()

    def parent() -> None:
        mine = os.getpid()

        def child() -> None:
            die_with_parent(mine)
            os.write(writable, b"ready")
            signal.pause()

        forked(child)
        os.close(writable)
        signal.pause()

    pid = forked(parent)
    os.close(writable)
    try:
        assert os.read(readable, 5) == b"ready"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    signal.alarm(5)  # ends the tests if the grandchild lives on
    try:
        assert os.read(readable, 1) == b""
    finally:
        signal.alarm(0)
        os.close(readable)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_ends_if_its_parent_has_ended_already(number: signal.Signals) -> None:
    pid = forked(lambda: die_with_parent(NO_PROCESS, number))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -number
    parent = os.getpid()
    assert os.waitstatus_to_exitcode(os.waitpid(forked(lambda: die_with_parent(parent, number)), 0)[1]) == 0


def test_an_interrupt_from_the_terminal_does_not_reach_the_child() -> None:
    def child() -> None:
        leave_interrupts_to_parent()
        os.kill(os.getpid(), signal.SIGINT)
        os._exit(7)

    assert os.waitstatus_to_exitcode(os.waitpid(forked(child), 0)[1]) == 7


@pytest.mark.parametrize("side", ["after_in_child", "after_in_parent", "before"])
def test_no_signal_is_lost_that_arrives_while_a_process_forks(side: str) -> None:
    """The child has the handlers of its parent, and ends. In the parent the event is set, and no function of
    `os.register_at_fork` is interrupted; after the fork the handler raises SystemExit again."""

    def parent() -> None:
        stopping, complete = threading.Event(), []
        hooks: Any = {side: lambda: (os.kill(os.getpid(), signal.SIGTERM), complete.append(True))}
        os.register_at_fork(**hooks)
        exit_on_signals(stopping)
        pid = os.fork()
        if pid == 0:
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == (0 if side == "after_in_child" else 7)
        assert stopping.is_set() == bool(complete) == (side != "after_in_child")
        with pytest.raises(SystemExit):
            os.kill(os.getpid(), signal.SIGTERM)
        os._exit(3)

    assert os.waitstatus_to_exitcode(os.waitpid(forked(parent), 0)[1]) == 3


def test_a_signal_ends_a_process_where_exceptions_are_dropped() -> None:
    def child() -> None:
        end_on_signals()
        with contextlib.suppress(SystemExit):
            os.kill(os.getpid(), signal.SIGTERM)
        os._exit(7)

    assert os.waitstatus_to_exitcode(os.waitpid(forked(child), 0)[1]) == 0


def test_the_end_of_a_process_is_a_text() -> None:
    texts = {0: "exit code 0", 1: "exit code 1", None: "exit code None", -9: "SIGKILL", -36: "signal 36"}
    for exitcode, text in texts.items():
        how = "was killed by" if (exitcode or 0) < 0 else "ended with"
        assert how_it_ended(exitcode) == f"its process {how} {text}"


def test_a_process_whose_mapped_file_does_not_fit_names_the_free_space() -> None:
    ended = how_it_ended(-signal.SIGBUS)
    assert ended.startswith("its process was killed by SIGBUS, as when a memory-mapped file does not fit: ")
    assert "/dev/shm has " in ended and ended.count(" MiB free") == 2


def ignoring(running: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    running.set()
    time.sleep(30)


def ending(running: Any) -> None:
    signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.1), os._exit(5)))
    running.set()
    time.sleep(30)


def test_processes_are_killed_after_one_common_limit() -> None:
    processes = []
    for target in (ignoring, ending, ignoring):
        running = FORK.Event()
        processes.append(FORK.Process(target=target, args=(running,), daemon=True))
        processes[-1].start()
        assert running.wait(30)
    began = time.monotonic()
    end_processes(processes, 1.0)
    assert 1.0 <= time.monotonic() - began < 2.0 * pace()
    assert [process.exitcode for process in processes] == [-signal.SIGKILL, 5, -signal.SIGKILL]
