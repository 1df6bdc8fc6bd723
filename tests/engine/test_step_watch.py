"""A hung step is found within one and a half times the limit; idle and slow loops do not count as hung."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
from typing import Any
from unittest.mock import Mock

import pytest
from vllm.v1.core.sched.interface import PauseState

from tests.engine.schedulers import OwnScheduler
from tests.support.cluster import until
from vllm_omni_ext.engine import agent
from vllm_omni_ext.engine.agent import ReplicaAgent, WithAgent, with_agent
from vllm_omni_ext.engine.step_watch import CALL_LIMIT_S, FATAL_TICKS, FIRST_STEP_FACTOR, TICKS, LoopClock, StepWatch

NEVER_S = 1000.0


def watched(*, ended: int = 1) -> tuple[LoopClock, StepWatch]:
    """A clock whose loop has begun a step after `ended` steps, and its watch without a thread."""
    clock = LoopClock()
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


@pytest.mark.parametrize("after", [0, TICKS, FATAL_TICKS - 2])
def test_a_step_that_returns_in_time_is_not_hung(after: int) -> None:
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


CALL = object()


def looping(*, paused: bool = False) -> tuple[LoopClock, Any, StepWatch]:
    """Return the clock of a loop after its first step, its input queue, and its watch without a thread."""
    clock, inputs = LoopClock(lambda: paused), queue.Queue[Any]()
    clock.follow(inputs, CALL)
    clock.begun = clock.ended = 1
    return clock, inputs, StepWatch(clock, 60.0, lambda: None)


def hung_after(watch: StepWatch) -> int:
    """Return the number of readings until the loop counts as hung; 0 if it never does."""
    return next((n for n in range(1, 1000) if watch.tick()), 0)


def test_a_loop_that_waits_for_input_is_idle_until_there_is_some() -> None:
    _, inputs, watch = looping()
    assert not hung_after(watch), "before its first turn the engine starts"
    loop = threading.Thread(target=lambda: [inputs.get() for _ in range(2)], daemon=True)
    loop.start()
    assert until(lambda: inputs.waiting)
    assert not hung_after(watch)
    inputs.put((None, "work"))
    assert until(lambda: inputs.waiting and inputs.empty_now()) and not hung_after(watch)
    inputs.put((None, "work"))
    loop.join()
    assert hung_after(watch) == FATAL_TICKS + 1, "it executes the second message"


def test_a_loop_that_does_not_take_its_input_is_hung() -> None:
    _, inputs, watch = looping()
    inputs.empty()
    inputs.put((None, "work"))
    inputs.waiting = True
    assert hung_after(watch) == FATAL_TICKS + 1


def test_a_loop_that_turns_is_not_hung() -> None:
    _, inputs, watch = looping()
    for _ in range(10 * FATAL_TICKS):
        inputs.empty()
        assert not watch.tick() and not watch.late


def test_a_call_has_a_limit_of_its_own() -> None:
    clock, inputs, watch = looping()
    inputs.put((CALL, "load_lora"))
    inputs.get()
    assert hung_after(watch) == FATAL_TICKS * int(CALL_LIMIT_S / 60.0) + 1
    inputs.empty()
    assert not clock.calling and hung_after(watch) == FATAL_TICKS + 1


def test_a_sleep_that_completes_after_its_call_has_the_limit_of_a_call() -> None:
    """vLLM completes it in the loop when the last step has ended; that step keeps its own limit."""
    clock, inputs, watch = looping(paused=True)
    inputs.put((CALL, "sleep"))
    inputs.get()
    clock.begun += 1
    inputs.empty()
    assert hung_after(watch) == FATAL_TICKS + 1
    clock.ended += 1
    assert hung_after(watch) == FATAL_TICKS * int(CALL_LIMIT_S / 60.0) + 1


def test_the_first_step_has_more_time() -> None:
    _, watch = watched(ended=0)
    last = FATAL_TICKS * FIRST_STEP_FACTOR
    assert [watch.tick() for _ in range(last)] == [False] * (last - 1) + [True]


def test_the_thread_winds_the_timer_up_until_the_step_is_hung() -> None:
    hung, clock, timer = threading.Event(), LoopClock(), Mock()
    clock.begun = 1
    watch = StepWatch(clock, 0.01, hung.set, timer)
    watch.start()
    assert hung.wait(30)
    times = [each.args[0] for each in timer.wind_up.mock_calls]
    assert len(times) > FATAL_TICKS * FIRST_STEP_FACTOR
    assert times == pytest.approx([1.5 * 0.01 * FIRST_STEP_FACTOR] * len(times)), "as the first step"
    watch.stop()
    timer.stop.assert_called_once()


KEEPS_THE_LOCK = """
import ctypes, faulthandler, os, signal, sys, threading

# As in a replica that is forked by a program which watches itself, such as pytest.
signal.signal(signal.SIGALRM, lambda *_: print("a handler", flush=True))
faulthandler.dump_traceback_later(1000)
if child := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGALRM)

from vllm_omni_ext.engine.step_watch import LockFreeTimer, LoopClock, StepWatch

clock = LoopClock()
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
def test_a_step_that_keeps_the_interpreter_lock_ends_the_process(stopped: bool) -> None:
    """Its log has the stack of the step."""
    words = [sys.executable, "-c", KEEPS_THE_LOCK, *(["stopped"] if stopped else [])]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == ((0, "the step has returned\n") if stopped else (1, "")), done
    assert ("a_step_that_hangs" in done.stderr) is not stopped


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Stands for the class of watches."""
    made = Mock()
    made.return_value.late = False
    monkeypatch.setattr(agent, "StepWatch", made)
    return made


def test_the_agent_watches_the_steps_of_its_scheduler(watch: Mock) -> None:
    with_agent(OwnScheduler([]))  # type: ignore[arg-type]
    watch.assert_not_called()
    assert WithAgent().step_timeout_s is None, "without a limit there is no watch"
    scheduler: Any = with_agent(OwnScheduler([]), 7.0)  # type: ignore[arg-type]
    clock, limit_s, _, timer = watch.call_args.args
    assert limit_s == 7.0 and timer is None, "this process is not the engine's alone"
    scheduled = scheduler.schedule()
    assert (clock.begun, clock.ended) == (1, 0)
    assert scheduler.update_from_output(scheduled, "done").keys() == {0, 1}
    assert (clock.begun, clock.ended) == (1, 1)
    assert not clock.in_call
    scheduler.pause_state = PauseState.PAUSED_NEW
    assert clock.in_call
    scheduler.shutdown()
    watch.return_value.stop.assert_called_once()


def test_no_heartbeat_is_sent_while_a_step_is_late(watch: Mock) -> None:
    own = ReplicaAgent(OwnScheduler([]), 7.0)  # type: ignore[arg-type]
    own.start()
    assert own.load() is not None
    watch.return_value.late = True
    assert own.load() is None
