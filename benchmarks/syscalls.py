"""Counts system calls of running processes with strace (a Linux program that must be installed).

strace stops a process at every call, so the counts are right, but times that are measured meanwhile are too long.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

NAMING = frozenset(
    {
        *("open", "openat", "openat2", "creat", "mkdir", "mkdirat", "mknod", "mknodat", "memfd_create"),
        *("link", "linkat", "symlink", "symlinkat", "rename", "renameat", "renameat2"),
        *("unlink", "unlinkat", "rmdir"),
    }
)
"""Calls that can make, open or remove something in a file system, or memory that is a file."""

ATTACHED = "attached"


def available() -> bool:
    """Return whether strace is installed."""
    return shutil.which("strace") is not None


@contextmanager
def counted(processes: Mapping[str, int]) -> Iterator[dict[str, Counter[str]]]:
    """Count the system calls of all threads of processes during the block.

    Yields a mapping, name of the process -> number of calls by name, which is filled at the end of the block. A call
    that runs at the end may be missing.

    Args:
        processes: process ids by name.

    Raises:
        RuntimeError: strace cannot attach to a process.
    """
    found: dict[str, Counter[str]] = {name: Counter() for name in processes}
    with tempfile.TemporaryDirectory() as folder:
        with ExitStack() as tracing:
            # This process last: its later children are traced too, and a traced strace cannot trace.
            for name, pid in sorted(processes.items(), key=lambda each: each[1] == os.getpid()):
                tracing.enter_context(_traced(pid, Path(folder, name.replace("/", "-"))))
            yield found
        for name in processes:
            found[name].update(parse(Path(folder, name.replace("/", "-")).read_text()))


@contextmanager
def _traced(pid: int, file: Path) -> Iterator[None]:
    words = ["strace", "-f", "-c", "-U", "calls,name", "-o", str(file), "-p", str(pid)]
    tracer = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    assert tracer.stderr is not None
    try:
        said = tracer.stderr.readline()
        if ATTACHED not in said:
            raise RuntimeError(f"strace cannot count the calls of process {pid}: {said.strip()}")
        yield
    finally:
        tracer.send_signal(signal.SIGINT)  # strace detaches and writes its counts
        tracer.communicate()


def parse(text: str) -> dict[str, int]:
    """Return the number of calls by name from the table of `strace -c`, without its last line, the sum."""
    rows = (line.split() for line in text.splitlines())
    return {row[1]: int(row[0]) for row in rows if len(row) == 2 and row[0].isdigit() and row[1] != "total"}
