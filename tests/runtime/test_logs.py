"""Logs of replicas, and what is said while they start."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.support.descriptors import open_files
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.runtime.launch.logs import TAIL_LINES, FileLogs, TerminalLogs

TALKER = ReplicaId("talker", 1)


def speak() -> None:
    """Body of a child that writes to its standard output and error."""
    os.write(1, b"out\n")
    os.write(2, b"err\n")


@pytest.mark.engine
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_writes_to_its_file(tmp_path: Path, capfd: pytest.CaptureFixture[str], method: str) -> None:
    logs = FileLogs(tmp_path / "new" / "logs")
    print("before")
    with logs.of(TALKER):
        child = multiprocessing.get_context(method).Process(target=speak)
        child.start()
    print("after")
    child.join()
    assert capfd.readouterr().out == "before\nafter\n"
    assert logs.path(TALKER).name == "talker-1.log"
    assert logs.path(TALKER).read_text() == "out\nerr\n"


def test_the_terminal_is_back_after_an_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Other threads of the test process may open and close files meanwhile: only those of the redirection count."""
    logs, before = FileLogs(tmp_path), open_files()
    log, streams = str(logs.path(TALKER)), {before[1], before[2]}
    with pytest.raises(ValueError), logs.of(TALKER):
        assert list(open_files().values()).count(log) == 2
        raise ValueError
    print("here")
    assert capfd.readouterr().out == "here\n"
    after = Counter(open_files().values())
    assert after[log] == 0 and all(after[stream] == Counter(before.values())[stream] for stream in streams)


@pytest.mark.engine
def test_a_file_is_continued(tmp_path: Path) -> None:
    logs = FileLogs(tmp_path)
    for word in ("one", "two"):
        with logs.of(TALKER):
            subprocess.run([sys.executable, "-c", f"print('{word}')"], check=True)
    assert logs.path(TALKER).read_text() == "one\ntwo\n"


def test_the_tail(tmp_path: Path) -> None:
    logs = FileLogs(tmp_path)
    assert str(logs.path(TALKER)) in logs.tail(TALKER)
    logs.path(TALKER).write_text("\n".join(f"line {i}." for i in range(100)))
    tail = logs.tail(TALKER)
    assert tail.endswith("  line 99.")
    assert f"line {100 - TAIL_LINES}." in tail and f"line {99 - TAIL_LINES}." not in tail


def test_the_terminal_needs_no_tail() -> None:
    logs = TerminalLogs()
    with logs.of(TALKER):
        pass
    assert "above" in logs.tail(TALKER)
