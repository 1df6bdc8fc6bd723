"""What the tests rely on themselves: capabilities, groups of test processes, the pace of the machine."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import capabilities, goldens, preloaded, processes, workers
from tests.support.capabilities import needs
from tests.support.loop_clock import stopped_clock
from tests.support.nested import run_suite
from tests.support.pace import pace

LACKING = "library no_such_module_anywhere"


def fork() -> None:
    """Start a child that ends at once."""
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)


@pytest.mark.engine
def test_a_missing_capability_skips_here_and_fails_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no no_such_module_anywhere here: ModuleNotFoundError"):
        needs(LACKING)
    monkeypatch.setenv("CI", "1")
    with pytest.raises(pytest.fail.Exception, match=f"this machine lacks: {LACKING}"):
        needs(LACKING)


@pytest.mark.engine
def test_a_capability_that_is_there_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "1")
    needs("library json")


def test_an_unknown_capability_is_an_error() -> None:
    with pytest.raises(KeyError):
        capabilities.missing("a flying carpet")


def test_files_that_share_engines_are_one_group() -> None:
    groups = {name: workers.group_of(f"tests/processes/{name}.py::test_x[y::z]") for name in workers.SHARED}
    assert groups == workers.SHARED
    assert workers.group_of("tests/serving/test_wav.py::test_a") == workers.group_of(
        "tests/serving/test_keys.py::test_b"
    )
    assert workers.group_of("tests/wire/test_hidden_states.py::test_a") == "tests/wire/test_hidden_states.py"
    apart = [f"tests/processes/{workers.APART[0]}.py::test_{name}" for name in "ab"]
    assert list(map(workers.group_of, apart)) == apart


def test_every_file_of_a_group_exists() -> None:
    for name in (*workers.SHARED, *workers.APART):
        assert Path(Path(__file__).parents[1], workers.PROCESSES, f"{name}.py").is_file(), name


@pytest.mark.engine
@pytest.mark.parametrize(("body", "fits"), [("assert True", True), ("assert False, 'the reason'", False)])
def test_the_output_of_a_nested_suite_is_shown(
    body: str, fits: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    suite = tmp_path / "test_it.py"
    suite.write_text(f"def test_one():\n    {body}\n")
    if fits:
        run_suite(suite, timeout_s=60, isolated=False)
        assert "1 passed" in capsys.readouterr().out
    else:
        with pytest.raises(AssertionError, match="exit code 1"):
            run_suite(suite, timeout_s=60, isolated=False)
        assert "the reason" in capsys.readouterr().out


@pytest.mark.engine
@pytest.mark.parametrize("start", [lambda: subprocess.run([sys.executable, "-c", ""], check=True), fork])
def test_a_process_that_is_not_announced_is_noticed(start: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_started", [])
    processes.end()
    start()
    with pytest.raises(pytest.fail.Exception, match="mark it `engine`"):
        processes.end()


def test_a_result_is_computed_once_for_each_key() -> None:
    computed: list[int] = []
    for key in (1, 2, 1):
        assert goldens.once(lambda key=key: computed.append(key) or key, "a test", key) == key  # type: ignore[misc]
    assert computed == [1, 2]


def test_the_pace_is_at_least_that_of_a_quiet_machine() -> None:
    assert 1.0 <= pace() < 1000.0


def test_variables_that_libraries_set_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or no later server of the test process would be started from the preloaded one."""
    monkeypatch.setenv("LD_LIBRARY_PATH", "/before")
    monkeypatch.delenv("AITER_SITUV2_A4W4", raising=False)
    server, before = preloaded.ForkServer(), dict(os.environ)
    monkeypatch.setenv("AITER_SITUV2_A4W4", "1")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/after")
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    assert server.environment() == before | {"PYTEST_CURRENT_TEST": os.environ["PYTEST_CURRENT_TEST"]}
    monkeypatch.setenv("VLLM_OMNI_SOMETHING", "1")
    assert server.environment() != before


async def test_timers_go_off_when_the_test_says_so() -> None:
    loop, off = asyncio.get_running_loop(), list[str]()
    with stopped_clock() as advance:
        loop.call_later(0.001, off.append, "first")
        loop.call_later(5.0, off.append, "second")
        await advance(0.0)
        assert off == []
        await advance(4.9)
        assert off == ["first"]
        await advance(0.1)
        assert off == ["first", "second"]
    await asyncio.wait_for(asyncio.sleep(0.001), 5)
