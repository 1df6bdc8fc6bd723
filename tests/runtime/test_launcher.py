"""Settings of processes that are started, without engines."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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

from vllm_omni_ext.config.schema import Cluster
from vllm_omni_ext.environment import SAMPLER
from vllm_omni_ext.runtime.launch.inherit import process_state
from vllm_omni_ext.runtime.launch.launcher import (
    Deployment,
    compute_threads,
    environment,
    frozen_heap,
    may_fork,
    replaced_kernels,
    temporary_files_in,
)
from vllm_omni_ext.topology.machine import THREADS

FORK = multiprocessing.get_context("fork")
A, B, C = "OMNI_TEST_A", "OMNI_TEST_B", "OMNI_TEST_C"
SERVER, OFFLINE = UsageContext.OPENAI_API_SERVER, UsageContext.LLM_CLASS


# -- environment and temporary files ----------------------------------------------------------------


def test_environment_is_changed_in_the_block_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(A, "set")
    monkeypatch.setenv(B, "set")
    monkeypatch.delenv(C, raising=False)
    before = dict(os.environ)
    with pytest.raises(RuntimeError), environment({A: "value"}, defaults={A: "default", B: "default", C: "default"}):
        assert [os.environ[name] for name in (A, B, C)] == ["value", "set", "default"]
        os.environ["OMNI_TEST_D"] = "new"
        del os.environ[B]
        raise RuntimeError
    assert dict(os.environ) == before


def test_only_the_variables_of_the_block_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other threads of the program read variables meanwhile."""
    written: list[tuple[bytes, bytes]] = []
    monkeypatch.setenv(A, "before")
    monkeypatch.setenv(B, "kept")
    with monkeypatch.context() as patch:
        patch.setattr(os, "putenv", lambda name, value: written.append((name, value)))
        patch.setattr(os, "unsetenv", lambda name: written.append((name, b"")))
        with environment({A: "inside"}, defaults={B: "default", C: "default"}):
            pass
    a, c = A.encode(), C.encode()
    assert written == [(c, b"default"), (a, b"inside"), (c, b""), (a, b"before")]


def _free() -> bool:
    """Whether another thread could take the lock of the process's state."""
    with ThreadPoolExecutor(1) as other:
        return other.submit(lambda: process_state.acquire(blocking=False) and not process_state.release()).result()


def _deployment() -> Any:
    return SimpleNamespace(progress=SimpleNamespace(speaking=contextlib.nullcontext()), fork=False)


@pytest.mark.parametrize(
    "block",
    [lambda: environment({}), lambda: temporary_files_in("/tmp"), lambda: Deployment.forking(_deployment())],
    ids=["environment", "temporary files", "forking"],
)
def test_deployments_of_one_program_change_its_state_one_after_the_other(block: Any) -> None:
    with block():
        assert not _free()
        with environment({A: "nested"}):
            assert not _free()
        assert not _free()
    assert _free()


@pytest.mark.engine
def test_a_fork_of_the_program_can_change_its_state_also_if_another_thread_did() -> None:
    with environment({}), ThreadPoolExecutor(1) as other:
        child = other.submit(_fork_and_look).result()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _fork_and_look() -> int:
    if (child := os.fork()) == 0:
        os._exit(not process_state.acquire(blocking=False))
    return child


@pytest.mark.parametrize(("set_to", "missing", "expected"), [(None, "nvcc", "0"), (None, "", None), ("1", "nvcc", "1")])
def test_stages_sample_without_flashinfer_where_it_cannot_be_compiled(
    set_to: str | None, missing: str, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SAMPLER, raising=False)
    if set_to is not None:
        monkeypatch.setenv(SAMPLER, set_to)
    stage = SimpleNamespace(env={}, cpu_threads=None)
    config = SimpleNamespace(cluster=Cluster(port_range="23000-23009"), stage=lambda name: stage)
    plan = SimpleNamespace(config=config, stage=lambda name: stage)
    deployment: Any = SimpleNamespace(plan=plan, _no_flashinfer=bool(missing))
    with Deployment._replica_environment(deployment, "talker", str(tmp_path)):
        assert os.environ.get(SAMPLER) == expected
        assert (os.environ["MC_MIN_RPC_PORT"], os.environ["MC_MAX_RPC_PORT"]) == ("23000", "23009")
        assert os.environ["UCX_TCP_PORT_RANGE"] == "23000-23009"


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


# -- forked processes -------------------------------------------------------------------------------


def _use_a_team(length: int) -> None:
    torch.zeros(length).add_(1).sum()


@pytest.mark.engine
def test_a_process_forked_after_a_computation_can_compute() -> None:
    if torch.get_num_threads() == 1:
        pytest.skip("one core: there is never a team")
    _use_a_team(10_000_000)
    with compute_threads(1):
        child = FORK.Process(target=_use_a_team, args=(10_000_000,))
        child.start()
    child.join(20)
    hung = child.is_alive()
    child.kill()
    assert not hung and torch.get_num_threads() > 1


def _look_for_kernels(answer: Any) -> None:
    """Replace kernels as a worker does; answers the number of vLLM's replacements, and the kernel's class."""
    with mock.patch.object(dispatcher, "register_kernels") as replaced:
        current_platform.register_triton_kernel_overrides()
    answer.put((replaced.call_count, type(ComputeSlotMappingKernel.kernel).__name__))


@pytest.mark.engine
def test_a_forked_process_has_the_kernels_of_the_platform() -> None:
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
    """As in any program; the test process has frozen its imports."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.engine
@pytest.mark.usefixtures("nothing_frozen")
def test_starting_replicas_from_a_program_collects_no_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[bool] = []
    monkeypatch.setattr(gc, "collect", lambda *_: searched.append(True))
    with frozen_heap(keep=False):
        assert gc.get_freeze_count() > 0
    assert not searched and gc.get_freeze_count() == 0
    with frozen_heap(keep=True):
        pass
    assert searched == [True] and gc.get_freeze_count() > 0
    with frozen_heap(keep=False):
        pass
    assert gc.get_freeze_count() > 0, "objects that the program has frozen stay frozen"
