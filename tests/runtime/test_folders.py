"""Private folders: removed with their owner, or at the next start if it was killed."""

from __future__ import annotations

import multiprocessing
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_omni_ext.runtime.folders import LOCK, PREFIX, PrivateFolder, remove_abandoned

FORK = multiprocessing.get_context("fork")
LIMIT_S = 10.0


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path


def _own(sender: multiprocessing.connection.Connection, *, fork: bool = False) -> None:
    folder = PrivateFolder()
    Path(folder.path, "logs").mkdir()
    child = FORK.Process(target=sender.recv, daemon=True)
    if fork:
        child.start()
    sender.send((folder.path, child.pid))
    sender.recv()


def _killed(*, fork: bool = False) -> tuple[Path, int | None]:
    """The folder of a process that was killed, and its child that lives on."""
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=_own, args=(theirs,), kwargs={"fork": fork})
    process.start()
    path, child = ours.recv()
    process.kill()
    process.join()
    return Path(path), child


def test_only_its_owner_can_look_into_it() -> None:
    folder = PrivateFolder()
    assert stat.S_IMODE(os.stat(folder.path).st_mode) == 0o700
    folder.remove()
    folder.remove()
    assert not os.path.exists(folder.path)


def test_one_in_use_stays() -> None:
    first, second = PrivateFolder(), PrivateFolder()
    remove_abandoned()
    assert os.path.isdir(first.path) and os.path.isdir(second.path)
    first.remove()
    second.remove()


def test_that_of_a_killed_process_goes_with_the_next_start() -> None:
    path, _ = _killed()
    assert path.is_dir()
    PrivateFolder().remove()
    assert not path.exists()


def test_it_stays_while_a_forked_process_lives() -> None:
    path, child = _killed(fork=True)
    assert child is not None
    remove_abandoned()
    assert path.is_dir()
    os.kill(child, 9)
    deadline = time.monotonic() + LIMIT_S
    while path.exists() and time.monotonic() < deadline:  # nobody's child any more: its end is not announced
        time.sleep(0.01)
        remove_abandoned()
    assert not path.exists()


def test_others_are_left_alone(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    being_made, elsewhere = temporary / f"{PREFIX}new", temporary / "something"
    for folder in (being_made, elsewhere):
        folder.mkdir()
    (elsewhere / LOCK).touch()
    link = temporary / f"{PREFIX}link"
    link.symlink_to(elsewhere)
    remove_abandoned()
    assert being_made.is_dir() and (elsewhere / LOCK).exists() and link.is_symlink()
    path, _ = _killed()
    monkeypatch.setattr(os, "getuid", lambda: 1 + os.geteuid())
    remove_abandoned()
    assert path.is_dir()
