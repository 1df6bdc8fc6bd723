"""`benchmarks/syscalls.py`: the system calls of a process are counted, its own and no others."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TypeAlias

import pytest

Import: TypeAlias = Callable[[str], ModuleType]

OPENS = """
import os, sys
print("ready", flush=True)
sys.stdin.readline()
for _ in range(7):
    os.close(os.open(os.devnull, os.O_RDONLY))
os.write(1, b"done\\n")
sys.stdin.readline()
"""


@pytest.mark.engine
@pytest.mark.needs("strace")
def test_calls_of_a_process_are_counted(benchmark: Import) -> None:
    syscalls: ModuleType = benchmark("syscalls")
    words = [sys.executable, "-c", OPENS]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            with syscalls.counted({"it/0": process.pid}) as counts:
                print(file=process.stdin, flush=True)
                assert process.stdout.readline() == "done\n"
        finally:
            process.kill()
    assert counts["it/0"]["openat"] == 7
    assert "openat" in syscalls.NAMING and "write" not in syscalls.NAMING


def test_the_sum_is_no_call(benchmark: Import) -> None:
    table = "  calls syscall\n------- -------\n     12 sendmsg\n      3 openat\n------- -------\n     15 total\n"
    assert benchmark("syscalls").parse(table) == {"sendmsg": 12, "openat": 3}
