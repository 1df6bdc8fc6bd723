"""What starts and ends processes, without any engine."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from vllm.platforms import current_platform
from vllm.triton_utils import HAS_TRITON, dispatcher
from vllm.usage.usage_lib import UsageContext
from vllm.v1.worker.block_table import ComputeSlotMappingKernel

from vllm_omni_ext.lifeline import end_processes
from vllm_omni_ext.runtime.launch.launcher import (
    compute_threads,
    environment,
    frozen_heap,
    may_fork,
    replaced_kernels,
    temporary_files_in,
)
from vllm_omni_ext.topology.cpu import THREADS

FORK = multiprocessing.get_context("fork")
LIFE_S = 30
"""A process that nobody ends goes by itself, should the tests be cut short."""
A, B, C = "OMNI_TEST_A", "OMNI_TEST_B", "OMNI_TEST_C"
SERVER, OFFLINE = UsageContext.OPENAI_API_SERVER, UsageContext.LLM_CLASS


# -- environment and temporary files ----------------------------------------------------------------


def test_values_win_and_defaults_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(A, "set")
    monkeypatch.setenv(B, "set")
    monkeypatch.delenv(C, raising=False)
    before = dict(os.environ)
    with environment({A: "value"}, defaults={A: "default", B: "default", C: "default"}):
        assert [os.environ[name] for name in (A, B, C)] == ["value", "set", "default"]
    assert dict(os.environ) == before


def test_what_is_changed_inside_does_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(A, "set")
    monkeypatch.delenv(B, raising=False)
    with pytest.raises(RuntimeError), environment({}, defaults={}):
        os.environ[B] = "new"
        del os.environ[A]
        raise RuntimeError
    assert os.environ[A] == "set"
    assert B not in os.environ


@pytest.mark.engine
def test_a_process_started_inside_sees_it() -> None:
    receiver, sender = FORK.Pipe(duplex=False)
    with environment({A: "inside"}, defaults={}):
        process = FORK.Process(target=lambda: sender.send(os.environ.get(A)))
        process.start()
    process.join()
    assert receiver.poll(0)
    assert receiver.recv() == "inside"


def test_temporary_files_go_into_the_folder(tmp_path: Path) -> None:
    before = (tempfile.gettempdir(), os.environ.get("TMPDIR"))
    with pytest.raises(RuntimeError), temporary_files_in(str(tmp_path)):
        assert Path(tempfile.mkdtemp()).parent == tmp_path
        assert os.environ["TMPDIR"] == str(tmp_path)
        raise RuntimeError
    assert (tempfile.gettempdir(), os.environ.get("TMPDIR")) == before


# -- fork or not ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("platform", "usage", "threads", "expected"),
    [
        ("cpu", SERVER, ["1", "8"], True),
        ("cpu", OFFLINE, ["1", "1"], True),
        ("cpu", OFFLINE, ["1", "2"], False),
        ("cpu", OFFLINE, ["1", None], False),
        ("cuda", SERVER, ["1", "1"], False),
    ],
)
def test_replicas_are_forked_only_where_it_is_safe(platform: str, usage: Any, threads: Any, expected: bool) -> None:
    stages = [SimpleNamespace(env={} if count is None else {THREADS: count}) for count in threads]
    plan: Any = SimpleNamespace(machine=SimpleNamespace(platform=platform), stages=stages)
    assert may_fork(plan, usage) is expected


# -- ending processes -------------------------------------------------------------------------------

Start = Callable[[Callable[..., None]], BaseProcess]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a process and wait until it is in its target."""
    started: list[BaseProcess] = []

    def run(target: Callable[..., None]) -> BaseProcess:
        running = FORK.Event()
        started.append(FORK.Process(target=target, args=(running,), daemon=True))
        started[-1].start()
        assert running.wait(5)
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.join()


def obedient(running: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    running.set()
    threading.Event().wait(LIFE_S)


def stubborn(running: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    running.set()
    time.sleep(LIFE_S)


def tidy(running: Any) -> None:
    signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.1), os._exit(5)))
    running.set()
    time.sleep(LIFE_S)


@pytest.mark.engine
def test_an_obedient_process_is_not_waited_for(start: Start) -> None:
    processes, before = [start(obedient), start(obedient)], time.monotonic()
    end_processes(processes, 10)
    assert time.monotonic() - before < 5
    assert [process.exitcode for process in processes] == [-signal.SIGTERM] * 2


@pytest.mark.engine
def test_a_stubborn_process_is_killed_when_the_time_is_up(start: Start) -> None:
    processes, before = [start(stubborn), start(obedient), start(stubborn)], time.monotonic()
    end_processes(processes, 0.3)
    took = time.monotonic() - before
    assert 0.3 <= took < 2  # one deadline for all, not one each
    assert [process.exitcode for process in processes] == [-signal.SIGKILL, -signal.SIGTERM, -signal.SIGKILL]


@pytest.mark.engine
def test_a_process_has_its_time_to_end_in_order(start: Start) -> None:
    process = start(tidy)
    end_processes([process], 10)
    assert process.exitcode == 5


@pytest.mark.engine
def test_processes_that_have_ended_are_left_alone(start: Start) -> None:
    process = start(tidy)
    process.kill()
    process.join()
    end_processes([process], 10)
    end_processes([], 10)
    assert process.exitcode == -signal.SIGKILL


def _use_a_team(length: int) -> None:
    torch.zeros(length).add_(1).sum()


@pytest.mark.engine
def test_a_process_forked_from_one_that_has_computed_can_compute() -> None:
    if torch.get_num_threads() == 1:
        pytest.skip("one core: there is never a team")
    _use_a_team(10_000_000)
    context = multiprocessing.get_context("fork")
    with compute_threads(1):
        child = context.Process(target=_use_a_team, args=(10_000_000,))
        child.start()
    child.join(20)
    hung = child.is_alive()
    child.kill()
    assert not hung and torch.get_num_threads() > 1


def _look_for_kernels(answer: Any) -> None:
    """What a worker does first; says how often vLLM replaced kernels for that, and with what."""
    with mock.patch.object(dispatcher, "register_kernels") as replaced:
        current_platform.register_triton_kernel_overrides()
    answer.put((replaced.call_count, type(ComputeSlotMappingKernel.kernel).__name__))


@pytest.mark.engine
def test_a_forked_process_has_the_kernels_of_the_platform_and_looks_for_none() -> None:
    answer = FORK.SimpleQueue()
    with replaced_kernels():
        child = FORK.Process(target=_look_for_kernels, args=(answer,))
        child.start()
    child.join(20)
    assert child.exitcode == 0
    assert answer.get() == (0, type(ComputeSlotMappingKernel.kernel).__name__)
    _look_for_kernels(answer)
    assert answer.get() == (0 if HAS_TRITON else 1, type(ComputeSlotMappingKernel.kernel).__name__)
    assert HAS_TRITON or isinstance(ComputeSlotMappingKernel.kernel, dispatcher.KernelOverride)


@pytest.fixture
def nothing_frozen() -> Iterator[None]:
    """As in a program that knows nothing of the garbage collector; the test process has frozen what it imported."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.engine
@pytest.mark.usefixtures("nothing_frozen")
def test_a_program_that_goes_on_is_not_searched_for_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's program with many objects starts replicas one after another, and each search takes a second."""
    searched: list[bool] = []
    monkeypatch.setattr(gc, "collect", lambda *_: searched.append(True))
    with frozen_heap(keep=False):
        assert gc.get_freeze_count() > 0
    assert not searched and gc.get_freeze_count() == 0
    with frozen_heap(keep=True):
        pass
    assert searched == [True] and gc.get_freeze_count() > 0


@pytest.mark.usefixtures("nothing_frozen")
def test_what_a_program_has_frozen_stays_frozen() -> None:
    gc.freeze()
    with frozen_heap(keep=False):
        pass
    assert gc.get_freeze_count() > 0
