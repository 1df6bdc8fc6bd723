"""A hung step is found within one and a half times the limit, and nothing else is taken for one."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import pytest

from tests.engine.test_agent import OwnScheduler
from vllm_omni_ext.engine import agent
from vllm_omni_ext.engine.agent import ReplicaAgent, WithAgent, with_agent
from vllm_omni_ext.engine.step_watch import FATAL_TICKS, FIRST_STEP_FACTOR, TICKS, StepClock, StepWatch

NEVER_S = 1000.0


def watched(*, ended: int = 1) -> tuple[StepClock, StepWatch]:
    """A clock whose loop has ended some steps and has begun another one, and its watch without a thread."""
    clock = StepClock()
    clock.begun, clock.ended = ended + 1, ended
    watch = StepWatch(clock, NEVER_S, lambda: None)
    assert not watch.tick()  # sees the step for the first time
    return clock, watch


def test_a_hung_step_is_late_and_then_fatal() -> None:
    _, watch = watched()
    seen = []
    for _ in range(FATAL_TICKS):
        fatal = watch.tick()
        seen.append((watch.late, fatal))
    assert seen == [(n >= TICKS, n >= FATAL_TICKS) for n in range(1, FATAL_TICKS + 1)]


@pytest.mark.parametrize("after", range(FATAL_TICKS - 1))
def test_a_step_that_returns_in_time_is_forgotten(after: int) -> None:
    clock, watch = watched()
    assert not any(watch.tick() for _ in range(after))
    clock.ended += 1
    assert not watch.tick() and not watch.late
    assert not any(watch.tick() for _ in range(10 * FATAL_TICKS)), "an idle loop is not hung"


def test_successive_steps_are_not_one_long_step() -> None:
    clock, watch = watched()
    for _ in range(10 * FATAL_TICKS):
        clock.ended += 1
        clock.begun += 1
        assert not watch.tick() and not watch.late


def test_steps_that_overlap_are_idle_only_when_all_have_ended() -> None:
    clock, watch = watched()
    clock.begun += 1
    clock.ended += 1
    assert [watch.tick() for _ in range(FATAL_TICKS + 1)] == [False] * FATAL_TICKS + [True]


class Timer:
    """Records for how many seconds it is wound up."""

    def __init__(self) -> None:
        self.wound_up: list[float] = []
        self.stopped = False

    def wind_up(self, limit_s: float) -> None:
        self.wound_up.append(limit_s)

    def stop(self) -> None:
        self.stopped = True


def test_the_timer_is_wound_up_at_every_reading() -> None:
    hung, clock, timer = threading.Event(), StepClock(), Timer()
    clock.begun = 1
    watch = StepWatch(clock, 0.01, hung.set, timer)  # type: ignore[arg-type]
    watch.start()
    assert hung.wait(30)
    assert len(timer.wound_up) > FATAL_TICKS * FIRST_STEP_FACTOR
    assert timer.wound_up == pytest.approx([1.5 * 0.01 * FIRST_STEP_FACTOR] * len(timer.wound_up)), "as the first step"
    watch.stop()
    assert timer.stopped


KEEPS_THE_LOCK = """
import ctypes, faulthandler, os, signal, sys, threading

# As in a replica that is forked by a program which watches itself, such as pytest.
signal.signal(signal.SIGALRM, lambda *_: print("a handler", flush=True))
faulthandler.dump_traceback_later(1000)
if child := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGALRM)

from vllm_omni_ext.engine.step_watch import LockFreeTimer, StepClock, StepWatch

clock = StepClock()
clock.begun, clock.ended = 2, 1
watch = StepWatch(clock, 0.4, lambda: print("the thread runs", flush=True), LockFreeTimer())
watch.start()
if "stopped" in sys.argv:
    watch.stop()

def a_step_that_hangs():
    ctypes.PyDLL(None).usleep(2_000_000)

a_step_that_hangs()
print("the step has returned", flush=True)
os._exit(0)  # as forked processes end: at an orderly end, faulthandler would wait for the parent's thread
"""


@pytest.mark.engine
@pytest.mark.parametrize("stopped", [False, True])
def test_a_step_that_keeps_the_interpreter_lock(stopped: bool) -> None:
    """No thread of Python can run, the process ends all the same, and says where it hung."""
    words = [sys.executable, "-c", KEEPS_THE_LOCK, *(["stopped"] if stopped else [])]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == ((0, "the step has returned\n") if stopped else (1, "")), done
    assert ("a_step_that_hangs" in done.stderr) is not stopped


def test_the_first_step_has_more_time() -> None:
    _, watch = watched(ended=0)
    last = FATAL_TICKS * FIRST_STEP_FACTOR
    assert [watch.tick() for _ in range(last)] == [False] * (last - 1) + [True]


def test_the_thread_calls_once_and_ends() -> None:
    hung = threading.Event()
    clock = StepClock()
    clock.begun, clock.ended = 2, 1
    StepWatch(clock, 0.01, hung.set).start()
    assert hung.wait(10)


class LateWatch:
    late = False

    def __init__(self, clock: StepClock, limit_s: float, hung: Any, timer: Any) -> None:
        self.clock, self.limit_s = clock, limit_s
        self.stopped = False
        assert timer is None, "this process is not the engine's alone"
        made.append(self)

    def start(self) -> None: ...

    def stop(self) -> None:
        self.stopped = True


made: list[LateWatch] = []


@pytest.fixture
def watches(monkeypatch: pytest.MonkeyPatch) -> list[LateWatch]:
    made.clear()
    monkeypatch.setattr(agent, "StepWatch", LateWatch)
    return made


def test_the_scheduler_notes_begin_and_end_of_a_step(watches: list[LateWatch]) -> None:
    scheduler: Any = with_agent(OwnScheduler([]), 7.0)  # type: ignore[arg-type]
    (watch,) = watches
    assert watch.limit_s == 7.0
    scheduled = scheduler.schedule()
    assert (watch.clock.begun, watch.clock.ended) == (1, 0)
    assert scheduler.update_from_output(scheduled, "done").keys() == {0, 1}
    assert (watch.clock.begun, watch.clock.ended) == (1, 1)
    scheduler.shutdown()
    assert watch.stopped


def test_a_late_step_sends_no_heartbeat(watches: list[LateWatch]) -> None:
    own = ReplicaAgent(OwnScheduler([]), 7.0)  # type: ignore[arg-type]
    own.start()
    assert own.load() is not None
    watches[0].late = True
    assert own.load() is None


def test_without_a_limit_nothing_is_watched(watches: list[LateWatch]) -> None:
    with_agent(OwnScheduler([]))  # type: ignore[arg-type]
    assert not watches and WithAgent().step_timeout_s is None
