"""What is said while replicas start."""

from __future__ import annotations

import os
import pty
import queue
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.runtime.launch.progress import Listener, Progress, spinner, text_of
from vllm_omni_ext.wire.loading import Loading, Teller

THINKER, TALKER = ReplicaId("thinker", 0), ReplicaId("talker", 0)
PATIENCE_S = 5.0
GIB = 1 << 30


def plan(**counts: int) -> Any:
    return SimpleNamespace(
        stages=[
            SimpleNamespace(name=name, replicas=[SimpleNamespace(id=ReplicaId(name, i)) for i in range(count)])
            for name, count in counts.items()
        ]
    )


def test_one_line_a_stage() -> None:
    said: list[str] = []
    seconds = iter([3.0, 5.25])
    progress = Progress(plan(thinker=1, talker=2, code2wav=0), said.append, lambda: next(seconds))
    progress.starting("in /logs")
    progress.ready(ReplicaId("talker", 1))
    progress.ready(ReplicaId("thinker", 0))
    progress.ready(ReplicaId("talker", 0))
    assert said == [
        "starting thinker (1 replica), talker (2 replicas); logs in /logs",
        "thinker ready after 3.0 s",
        "talker ready after 5.2 s",
    ]


def test_nothing_moves_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with spinner("loading"):
        print("line")
    assert capsys.readouterr().out == "line\n"


def report(replica: ReplicaId, **fields: Any) -> Loading:
    return Loading(replica=str(replica), phase=fields.pop("phase", "loading"), **fields)


def test_how_a_report_reads(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "a.incomplete").write_bytes(bytes(3 << 20))
    assert text_of(report(THINKER, loaded=12 * GIB, total=59 * GIB)) == "thinker/0: loading 12.0 of 59.0 GiB (20 %)"
    assert text_of(report(THINKER, loaded=1 << 20, total=4 << 20)) == "thinker/0: loading 1.0 of 4.0 MiB (25 %)"
    assert text_of(report(THINKER, loaded=5)) == "thinker/0: loading"
    told = report(THINKER, phase="downloading", folder=str(tmp_path))
    assert text_of(told) == "thinker/0: downloading, 3.0 MiB so far"
    assert text_of(report(THINKER, phase="warming up")) == "thinker/0: weights loaded, warming up"


def test_without_a_terminal_a_line_comes_now_and_then() -> None:
    said: list[str] = []
    progress = Progress(plan(thinker=1, talker=1), said.append, lambda: 0.0, every_s=60.0)
    progress.begun(THINKER)
    progress.loading(report(THINKER, loaded=GIB, total=2 * GIB))
    progress.loading()
    assert said == []
    often = Progress(plan(thinker=1, talker=1), said.append, lambda: 0.0, every_s=0.0)
    for replica in (THINKER, TALKER):
        often.begun(replica)
    often.loading()
    often.loading(report(THINKER, loaded=GIB, total=2 * GIB))
    often.loading(report(TALKER, phase="warming up"))
    assert said == [
        "thinker/0: loading 1.0 of 2.0 GiB (50 %)",
        "talker/0: weights loaded, warming up; thinker/0: loading 1.0 of 2.0 GiB (50 %)",
    ]
    often.ready(THINKER)
    often.loading(report(THINKER, phase="warming up"))
    assert said[2:] == ["thinker ready after 0.0 s", "talker/0: weights loaded, warming up"], "a late report counts not"


def test_on_a_terminal_one_line_changes() -> None:
    said, shown = [], []
    progress = Progress(plan(thinker=1), said.append, lambda: 0.0, every_s=0.0)
    progress.begun(THINKER)
    with progress.shown(shown.append):
        progress.loading(report(THINKER, loaded=GIB, total=2 * GIB))
        progress.loading(report(THINKER, loaded=2 * GIB, total=2 * GIB))
    assert said == []
    assert shown == ["thinker/0: loading 1.0 of 2.0 GiB (50 %)", "thinker/0: loading 2.0 of 2.0 GiB (100 %)"]


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[tuple[str, queue.Queue[str], Progress]]:
    """A listener's socket, the lines that are told, and whose they are."""
    lines: queue.Queue[str] = queue.Queue()
    progress = Progress(plan(thinker=1), lines.put, lambda: 0.0, every_s=0.01)
    progress.begun(THINKER)
    listener = Listener(str(tmp_path), progress)
    yield listener.path, lines, progress
    listener.close()
    listener.close()


def test_reports_arrive_and_are_repeated_while_nobody_speaks(listening: Any) -> None:
    path, lines, progress = listening
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        stranger.sendto(b"nonsense", path)
    teller = Teller(path, str(THINKER))
    teller.say("loading", loaded=1, total=4)
    expected = "thinker/0: loading 0.0 of 0.0 MiB (25 %)"
    assert [lines.get(timeout=PATIENCE_S) for _ in range(3)] == [expected] * 3
    progress.over(THINKER)
    teller.close()


def test_nobody_has_to_listen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMNI_LOADING", raising=False)
    assert Teller.of_this_process() is None
    monkeypatch.setenv("OMNI_LOADING", f"{tmp_path}/a folder/gone thinker/0")
    teller = Teller.of_this_process()
    assert teller is not None
    teller.say("loading")
    teller.close()


def test_the_terminals_line_changes(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    parent, child = pty.openpty()
    terminal = os.fdopen(child, "w")
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with spinner("loading") as show:
        assert show is not None
        show("thinker/0: loading 1.0 of 2.0 GiB (50 %)")
    terminal.close()
    seen = b""
    while b"(50 %)" not in seen:
        seen += os.read(parent, 4096)
    os.close(parent)
