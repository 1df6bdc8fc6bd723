"""Private folders: removed with their owner, or at the next start if it was killed."""

from __future__ import annotations

import multiprocessing
import os
import stat
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq

from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.runtime.launch import folders
from vllm_omni_ext.runtime.launch.folders import LOCK, PREFIX, PrivateFolder, remove_abandoned

FORK = multiprocessing.get_context("fork")
LIMIT_S = 30.0


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of the test's own, with a short path: pytest's may be too long for sockets."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


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


@pytest.mark.parametrize(("free_mib", "refused"), [(63, True), (64, False)])
def test_a_full_file_system_is_named(
    temporary: Path, free_mib: int, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free_mib << 20))
    if not refused:
        return PrivateFolder().remove()
    with pytest.raises(ConfigError, match=f"^TMPDIR: {temporary} has 63 MiB free; .* need 64 MiB$"):
        PrivateFolder()
    assert not list(temporary.iterdir())


def test_private_folder_has_mode_0700_and_is_not_removed_while_it_is_in_use() -> None:
    folder, other = PrivateFolder(), PrivateFolder()
    remove_abandoned()
    assert stat.S_IMODE(os.stat(folder.path).st_mode) == 0o700 and os.path.isdir(other.path)
    for each in (folder, folder, other):
        each.remove()
        assert not os.path.exists(each.path)


def test_the_logs_of_a_folder_may_stay() -> None:
    folder = PrivateFolder()
    path = Path(folder.path)
    for name in ("logs", "thinker-0"):
        path.joinpath(name).mkdir()
        path.joinpath(name, "file").touch()
    folder.remove(keep="logs")
    PrivateFolder().remove()  # removes abandoned ones
    assert [each.name for each in path.iterdir()] == ["logs"] and path.joinpath("logs", "file").exists()


def test_a_long_temporary_folder_leaves_room_for_paths_of_sockets(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = temporary / ("x" * 60)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    monkeypatch.setattr(folders, "SHORT", str(temporary))
    folder = PrivateFolder()
    assert Path(folder.path).parent == temporary
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        place = Path(folder.path, f"{'s' * 20}-10")
        place.mkdir()
        socket.bind(f"ipc://{place}/{uuid.uuid4()}")
    folder.remove()


@pytest.mark.engine
def test_folder_is_kept_while_a_forked_process_lives() -> None:
    path, child = _killed(fork=True)
    assert child is not None
    remove_abandoned()
    assert path.is_dir()
    os.kill(child, 9)
    deadline = time.monotonic() + LIMIT_S
    while path.exists() and time.monotonic() < deadline:  # not a child of this process: its end is not announced
        time.sleep(0.01)
        PrivateFolder().remove()  # as the next start does
    assert not path.exists()


@pytest.mark.engine
def test_folders_of_other_programs_are_not_removed(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
