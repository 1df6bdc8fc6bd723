"""Progress lines while replicas start, and their logs."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pty
import queue
import socket
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.descriptors import open_files
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.runtime.launch.logs import TAIL_LINES, Logs
from vllm_omni_ext.runtime.launch.progress import SHOWN_EVERY_S, Listener, Progress, spinner
from vllm_omni_ext.wire.loading import report, variable

THINKER, TALKER = ReplicaId("thinker", 0), ReplicaId("talker", 0)
PATIENCE_S = 30.0


def plan(**counts: int) -> Any:
    return SimpleNamespace(
        stages=[
            SimpleNamespace(name=name, replicas=[SimpleNamespace(id=ReplicaId(name, i)) for i in range(count)])
            for name, count in counts.items()
        ]
    )


def test_each_stage_has_one_line_when_its_last_replica_is_ready() -> None:
    lines: list[str] = []
    seconds = iter([3.0, 5.25])
    progress = Progress(plan(thinker=1, talker=2, code2wav=0), lines.append, lambda: next(seconds))
    progress.starting("in /logs")
    progress.ready(ReplicaId("talker", 1))
    progress.ready(ReplicaId("thinker", 0))
    progress.ready(ReplicaId("talker", 0))
    assert lines == [
        "starting thinker (1 replica), talker (2 replicas); logs in /logs",
        "thinker ready after 3.0 s",
        "talker ready after 5.2 s",
    ]


def test_progress_has_a_line_a_replica_on_a_terminal_and_one_line_elsewhere() -> None:
    lines: list[str] = []
    shown: list[str] = []
    progress = Progress(plan(thinker=1, talker=1), lines.append, lambda: 0.0)
    progress.show()
    for replica in (THINKER, TALKER):
        progress.begun(replica)
    progress.reported(str(THINKER), "loading weights")
    progress.show()
    with progress.shown(shown.append):
        assert progress.every_s == SHOWN_EVERY_S
        progress.show()
    progress.ready(THINKER)
    progress.reported(str(THINKER), "warming up")  # late
    progress.show()
    progress.ready(TALKER)
    progress.show()
    assert shown == ["talker/0: starting, 0 s\nthinker/0: loading weights, 0 s"]
    assert lines == [
        "talker/0: starting, 0 s; thinker/0: loading weights, 0 s",
        "thinker ready after 0.0 s",
        "talker/0: starting, 0 s",
        "talker ready after 0.0 s",
    ]


def test_the_seconds_are_those_of_the_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    now = itertools.count(100.0, 7.0)
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    progress = Progress(plan(thinker=1, talker=1), lines.append, lambda: 0.0)
    progress.begun(THINKER)
    progress.begun(TALKER)
    progress.reported(str(THINKER), "warming up")
    progress.show()
    assert lines == ["talker/0: starting, 7 s; thinker/0: warming up, 14 s"]


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[tuple[str, queue.Queue[str], Progress]]:
    """A listener's socket, its lines and its progress."""
    lines: queue.Queue[str] = queue.Queue()
    progress = Progress(plan(thinker=1), lines.put, lambda: 0.0, every_s=0.01)
    progress.begun(THINKER)
    listener = Listener(str(tmp_path), progress)
    yield listener.path, lines, progress
    listener.close()
    listener.close()


def test_reports_arrive_and_are_repeated_until_the_next(listening: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path, lines, progress = listening
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.sendto(b"nonsense\xff", path)
    report("loading weights")  # without the variable
    for where in (path, f"{path}/gone"):  # no process listens at the second: no error
        for name, value in variable(where, str(THINKER)).items():
            monkeypatch.setenv(name, value)
        report("loading weights")
    expected = "thinker/0: loading weights, 0 s"
    while lines.get(timeout=PATIENCE_S) != expected:
        pass
    assert [lines.get(timeout=PATIENCE_S) for _ in range(3)] == [expected] * 3
    progress.over(THINKER)


def test_progress_is_shown_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    parent, child = pty.openpty()
    terminal = os.fdopen(child, "w")
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with spinner("loading") as show:
        assert show is not None
        show("talker/0: starting, 2 s\nthinker/0: loading weights, 1 s")
    terminal.close()
    seen = b""
    while b"weights, 1 s" not in seen:
        seen += os.read(parent, 4096)
    os.close(parent)


def write() -> None:
    """Body of a child that writes to its standard output and error."""
    os.write(1, b"out\n")
    os.write(2, b"err\n")


@pytest.mark.engine
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_output_of_a_child_is_appended_to_its_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], method: str
) -> None:
    logs = Logs(tmp_path / "new" / "logs")
    print("before")
    for _ in range(2):
        with logs.of(TALKER):
            child = multiprocessing.get_context(method).Process(target=write)
            child.start()
        child.join()
    print("after")
    assert capfd.readouterr().out == "before\nafter\n"
    assert logs.path(TALKER).name == "talker-0.log"
    assert logs.path(TALKER).read_text() == "out\nerr\n" * 2


def test_the_terminal_is_restored_after_an_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Other threads of the test process may open and close files meanwhile: only those of the redirection count."""
    logs, before = Logs(tmp_path), open_files()
    log, streams = str(logs.path(TALKER)), {before[1], before[2]}
    with pytest.raises(ValueError), logs.of(TALKER):
        assert list(open_files().values()).count(log) == 2
        raise ValueError
    print("here")
    assert capfd.readouterr().out == "here\n"
    after = Counter(open_files().values())
    assert after[log] == 0 and all(after[stream] == Counter(before.values())[stream] for stream in streams)


def test_the_tail_has_the_last_lines(tmp_path: Path) -> None:
    logs = Logs(tmp_path)
    assert str(logs.path(TALKER)) in logs.tail(TALKER)
    logs.path(TALKER).write_text("\n".join(f"line {i}." for i in range(100)))
    tail = logs.tail(TALKER)
    assert tail.endswith("  line 99.")
    assert f"line {100 - TAIL_LINES}." in tail and f"line {99 - TAIL_LINES}." not in tail
    assert "above" in Logs().tail(TALKER)


def test_the_tail_has_the_error_and_not_later_lines_of_vllm(tmp_path: Path) -> None:
    logs = Logs(tmp_path)
    error = [
        f"(EngineCore pid=7) ERROR 11-26 00:58 [core.py:9] {line}"
        for line in ("fine", "fatal", *"abc", "ValueError: x")
    ]
    error[1] = f"{error[1]}: EngineCore encountered a fatal error."
    after = ["(EngineCore pid=7) INFO 11-26 00:58 [core.py:1] exiting", "RuntimeError: Invalid process group specified"]
    assert not logs.needed()
    logs.path(TALKER).write_text("\n".join([*error, *after]))
    assert logs.needed()
    assert logs.tail(TALKER).splitlines()[1:] == [f"  {line}" for line in error[1:]]
    logs.path(TALKER).unlink()
    assert logs.needed(), "an error has named the file"
