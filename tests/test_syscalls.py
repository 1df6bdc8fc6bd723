"""`benchmarks/syscalls.py`: the system calls of a process are counted, its own and no others."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
OPENS = """
import os, sys
print("ready", flush=True)
sys.stdin.readline()
for _ in range(7):
    os.close(os.open(os.devnull, os.O_RDONLY))
os.write(1, b"done\\n")
sys.stdin.readline()
"""


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a benchmark as a module."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def test_calls_of_a_process_are_counted(load: Any) -> None:
    syscalls: ModuleType = load("syscalls")
    if not syscalls.available():
        pytest.skip("no strace here")
    words = [sys.executable, "-c", OPENS]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            with syscalls.counted({"it/0": process.pid}) as counts:
                print(file=process.stdin, flush=True)
                assert process.stdout.readline() == "done\n"
        except RuntimeError as error:
            pytest.skip(str(error))
        finally:
            process.kill()
    assert counts["it/0"]["openat"] == 7
    assert counts["it/0"]["write"] == 1
    assert "openat" in syscalls.NAMING and "write" not in syscalls.NAMING


def test_the_sum_is_no_call(load: Any) -> None:
    table = "  calls syscall\n------- -------\n     12 sendmsg\n      3 openat\n------- -------\n     15 total\n"
    assert load("syscalls").parse(table) == {"sendmsg": 12, "openat": 3}
