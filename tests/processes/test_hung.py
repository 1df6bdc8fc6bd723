"""A replica whose engine loop hangs, in a step or between steps, is ended, and the others answer."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from tests.processes.conftest import MAX_LEN, STEP_TOKENS
from tests.processes.test_replicas import answers, both_up, restarts, same, wait_busy
from tests.support.cluster import STAGES, until
from tests.support.pace import pace

pytestmark = pytest.mark.engine

LIMIT_S = 6.0
REQUESTS = 8


def hang_next_step(*_: Any) -> None:
    """A signal's handler, which forked replicas inherit: the next step of the engine loop does not return."""
    UniProcExecutor.execute_model = lambda *args, **kwargs: threading.Event().wait()  # type: ignore[assignment, return-value, method-assign]


def hang_next_step_with_the_lock(*_: Any) -> None:
    """The same, and no other thread of the process runs any more: the C function keeps the interpreter lock."""
    UniProcExecutor.execute_model = lambda *args, **kwargs: ctypes.PyDLL(None).sleep(3600)  # type: ignore[method-assign]


def hang_next_request(*_: Any) -> None:
    """The engine loop hangs when it takes the next message from its input queue."""
    EngineCoreProc._handle_client_request = lambda *args, **kwargs: threading.Event().wait()  # type: ignore[assignment, return-value, method-assign]


def hang_between_steps(*_: Any) -> None:
    """The engine loop hangs between two steps."""
    EngineCoreProc._process_engine_step = lambda *args, **kwargs: threading.Event().wait()  # type: ignore[assignment, return-value, method-assign]


HANGS = {
    signal.SIGUSR1: (hang_next_step, -signal.SIGKILL),
    signal.SIGUSR2: (hang_next_step_with_the_lock, -signal.SIGALRM),
    signal.SIGURG: (hang_next_request, -signal.SIGKILL),
    signal.SIGWINCH: (hang_between_steps, -signal.SIGKILL),
}
"""Ways in which a loop hangs, and how the process then ends."""


@pytest.fixture(scope="module")
def watched(tiny: Path) -> Iterator[Any]:
    from vllm import LLM

    before = {number: signal.signal(number, hang) for number, (hang, _) in HANGS.items()}
    two = {stage: {"replicas": 2, "step_timeout_s": LIMIT_S} for stage in STAGES}
    size = {"max_model_len": MAX_LEN, "max_num_batched_tokens": STEP_TOKENS}
    with LLM(str(tiny), omni=True, stage_overrides=two, **size) as omni:
        yield omni
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def undisturbed(watched: Any) -> tuple[list[Any], float]:
    """The answers, and the seconds that they take."""
    answers(watched, REQUESTS)  # both replicas of each stage have made their first step
    began = time.monotonic()
    return answers(watched, REQUESTS), time.monotonic() - began


@pytest.mark.parametrize(
    ("stage", "number"),
    [
        pytest.param("thinker", signal.SIGUSR1, marks=pytest.mark.extended),
        pytest.param("talker", signal.SIGUSR1, marks=pytest.mark.extended),
        pytest.param("code2wav", signal.SIGUSR1, marks=pytest.mark.extended),
        pytest.param("talker", signal.SIGUSR2, marks=pytest.mark.extended),
        ("thinker", signal.SIGWINCH),
        pytest.param("talker", signal.SIGWINCH, marks=pytest.mark.extended),
        pytest.param("code2wav", signal.SIGWINCH, marks=pytest.mark.extended),
        pytest.param("talker", signal.SIGURG, marks=pytest.mark.extended),
        pytest.param("thinker", signal.SIGURG, marks=pytest.mark.extended),
        pytest.param("code2wav", signal.SIGURG, marks=pytest.mark.extended),
    ],
)
def test_a_hung_loop_is_found_and_answered_elsewhere(
    stage: str, number: signal.Signals, watched: Any, undisturbed: tuple[list[Any], float]
) -> None:
    expected, usual_s = undisturbed
    got: list[Any] = []
    asking = threading.Thread(target=lambda: got.extend(answers(watched, REQUESTS)))
    asking.start()
    hung, before = wait_busy(watched, stage), restarts(watched, stage)
    process = watched._deployment.processes()[hung]
    began = time.monotonic()
    os.kill(process.pid, number)
    # Not `join`: the supervisor waits for the process too, and one of the two finds none.
    assert until(lambda: process.exitcode == HANGS[number][1], 2 * LIMIT_S * pace())
    asking.join(120)
    # The other replica computes all answers, while the next one starts.
    assert time.monotonic() - began < (2 * LIMIT_S + 3 * usual_s) * pace()
    assert same(got, expected)
    assert until(lambda: both_up(watched, stage), 60)
    assert restarts(watched, stage) == {each: before[each] + int(each == hung) for each in before}
    assert same(answers(watched, REQUESTS), expected), (
        "the other replica's first step, and the new one's, are no hung steps"
    )
