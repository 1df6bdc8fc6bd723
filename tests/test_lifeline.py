"""A process ends with its parent, however that ends."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

import pytest

from vllm_omni_ext.lifeline import die_with_parent, how_it_ended, leave_interrupts_to_parent

pytestmark = [pytest.mark.engine, pytest.mark.skipif(sys.platform != "linux", reason="prctl(2)")]
NOBODY = 2**22 + 1
"""No process id on Linux."""


def forked(body: Callable[[], None]) -> int:
    """Run something in a child, which ends without cleaning up."""
    pid = os.fork()
    if pid == 0:
        body()
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
def test_a_parent_that_has_ended_already_is_noticed(number: signal.Signals) -> None:
    pid = forked(lambda: die_with_parent(NOBODY, number))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -number


def test_a_parent_that_lives_changes_nothing() -> None:
    parent = os.getpid()
    pid = forked(lambda: die_with_parent(parent))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_an_interrupt_from_the_terminal_does_not_reach_the_child() -> None:
    def child() -> None:
        leave_interrupts_to_parent()
        os.kill(os.getpid(), signal.SIGINT)
        os._exit(7)

    assert os.waitstatus_to_exitcode(os.waitpid(forked(child), 0)[1]) == 7


@pytest.mark.parametrize(
    ("exitcode", "words"),
    [
        (1, "its process ended with exit code 1"),
        (0, "its process ended with exit code 0"),
        (None, "its process ended with exit code None"),
        (-9, "its process was killed by SIGKILL"),
        (-11, "its process was killed by SIGSEGV"),
        (-36, "its process was killed by signal 36"),
    ],
)
def test_how_a_process_ended(exitcode: int | None, words: str) -> None:
    assert how_it_ended(exitcode) == words
