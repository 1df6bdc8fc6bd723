"""The file with the secret of a user's deployments: creation, permissions, refusals."""

from __future__ import annotations

import multiprocessing
import os
import stat
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest

from vllm_omni_ext.coordinator.keys import Keys
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.runtime.launch import secret as secret_file
from vllm_omni_ext.runtime.launch.secret import default_file, find, find_or_make, read_by_others

AT_ONCE = 8
ROUNDS = 5


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder for state."""
    folder = tmp_path / "state"
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))
    return folder


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_default_secret_file_follows_xdg_state_home(
    state: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert default_file() == state / "vllm-omni-ext" / "cluster.secret"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for unusable in ("", "relative/path"):  # ignored, as in the XDG specification
        monkeypatch.setenv("XDG_STATE_HOME", unusable)
        assert default_file() == tmp_path / "home" / ".local" / "state" / "vllm-omni-ext" / "cluster.secret"


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_secret_file_is_created_once_with_mode_0600(mask: int) -> None:
    assert find() is None
    before = os.umask(mask)
    try:
        file, made = find_or_make()
    finally:
        os.umask(before)
    assert made and file == default_file()
    assert (mode(file), mode(file.parent)) == (0o600, 0o700)
    assert Keys.read(str(file)) is not None
    content = file.read_bytes()
    assert find_or_make() == (file, False) and find() == file
    assert file.read_bytes() == content
    assert list(file.parent.iterdir()) == [file]
    file.unlink()
    assert find_or_make()[0].read_bytes() != content


def _start(together: Barrier, said: Any, folders: list[Path]) -> None:
    for number, folder in enumerate(folders):
        os.environ["XDG_STATE_HOME"] = str(folder)
        together.wait()
        file, made = find_or_make()
        said.put((number, made, file.read_bytes()))


@pytest.mark.engine
def test_processes_that_start_at_once_have_the_same_secret(
    state: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    context = multiprocessing.get_context("fork")
    together, said = context.Barrier(AT_ONCE), context.Queue()
    folders = [tmp_path / str(number) for number in range(ROUNDS)]
    processes = [context.Process(target=_start, args=(together, said, folders)) for _ in range(AT_ONCE)]
    for process in processes:
        process.start()
    answers = [said.get(timeout=30) for _ in range(AT_ONCE * ROUNDS)]
    for process in processes:
        process.join()
    for number, folder in enumerate(folders):
        found = [(made, content) for which, made, content in answers if which == number]
        assert sorted(made for made, _ in found) == [False] * (AT_ONCE - 1) + [True]
        assert len({content for _, content in found}) == 1
        monkeypatch.setenv("XDG_STATE_HOME", str(folder))
        assert list(default_file().parent.iterdir()) == [default_file()]


def error_of(call: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize("unsafe", [0o604, 0o640, 0o644, 0o660, 0o602])
def test_secret_file_readable_by_others_is_refused(unsafe: int) -> None:
    file, _ = find_or_make()
    assert not read_by_others(file) and not read_by_others(file.with_name("none"))
    file.chmod(unsafe)
    assert read_by_others(file)
    for call in (find, find_or_make):
        assert f"others may read '{file}' (mode {unsafe:04o})" in error_of(call)
    file.chmod(0o600)
    file.parent.chmod(0o755)
    assert find() == file
    file.parent.chmod(unsafe | 0o722)
    for call in (find, find_or_make):
        assert f"others may write into '{file.parent}': chmod 700" in error_of(call)


@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
def test_a_secret_that_is_no_regular_file_is_refused(kind: str, tmp_path: Path) -> None:
    file = default_file()
    file.parent.mkdir(parents=True, mode=0o700)
    (tmp_path / "elsewhere").write_text("a readable secret of another user")
    make = {
        "link": lambda: file.symlink_to(tmp_path / "elsewhere"),
        "folder": file.mkdir,
        "pipe": lambda: os.mkfifo(file),
    }
    make[kind]()
    for call in (find, find_or_make):
        assert f"'{file}' is no regular file" in error_of(call)


def test_secret_file_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    file, _ = find_or_make()
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert f"belongs to user {owner}, not to you" in error_of(find)
    monkeypatch.setattr(secret_file, "_check_folder", lambda folder: None)
    for call in (find, find_or_make):
        assert error_of(call).startswith(f"cluster secret: '{file}' belongs to user {owner}, not to you; name another")


def test_a_folder_that_cannot_be_made_is_an_error_with_advice(state: Path) -> None:
    state.write_text("a file where the folder should be")
    said = error_of(find_or_make)
    assert said.startswith(f"cluster secret: cannot make '{default_file()}': ")
    assert said.endswith("name another file with --omni-cluster-secret-file")


def test_an_interrupted_start_leaves_no_partial_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "link", killed)
    with pytest.raises(KeyboardInterrupt):
        find_or_make()
    assert list(default_file().parent.iterdir()) == []
