"""Creates the private folders of deployments, and removes those of killed deployments.

A killed deployment does not remove its folder. Each folder contains a file that is locked while a process of the
deployment lives. The system releases the lock when the last process ends, and the next start removes the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from zmq import IPC_PATH_MAX_LEN

from vllm_omni_ext.errors import ConfigError

PREFIX = "omni-"

LOCK = "lock"
"""File name of the lock. The file gets this name once it is locked; a folder without this file is being created."""

LONGEST_NAME = 75
"""Characters in a socket's path after the parent folder: the private folder's name (14), the name of a replica's
folder, and vLLM's name for the socket (37)."""

LEAST_FREE = 64 << 20
"""Free bytes that the file system must have at the start. The metrics of each process take some MiB; logs grow."""

SHORT = "/tmp"
"""Parent of private folders if sockets below the system's folder for temporary files would have too long paths."""


class PrivateFolder:
    """A new folder for sockets, logs and temporary files that other users cannot read.

    Processes forked from this one also hold the folder's lock.

    Attributes:
        path: path of the folder.

    Raises:
        ConfigError: the file system is full.
    """

    def __init__(self) -> None:
        remove_abandoned()
        _check_space()
        self.path = tempfile.mkdtemp(prefix=PREFIX, dir=_parent())
        unlocked = Path(self.path, f"{LOCK}.new")
        self._lock: int | None = os.open(unlocked, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unlocked.rename(unlocked.with_name(LOCK))

    def remove(self, keep: str = "") -> None:
        """Remove the folder with its contents; a second call does nothing.

        Args:
            keep: name of a subfolder that is not removed, neither now nor by a later start; "" = none.
        """
        if self._lock is None:
            return
        if keep:
            for each in os.scandir(self.path):
                if each.name != keep:
                    remove = shutil.rmtree if each.is_dir(follow_symlinks=False) else os.unlink
                    with contextlib.suppress(OSError):
                        remove(each.path)
        else:
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
        self._lock = None


def remove_abandoned() -> None:
    """Remove this user's deployment folders whose lock no live process holds."""
    for lock in Path(_parent()).glob(f"{PREFIX}*/{LOCK}"):
        with contextlib.suppress(OSError):  # owned by another user, in use, or being removed by another process
            if lock.parent.lstat().st_uid == os.getuid() and not _in_use(lock):
                shutil.rmtree(lock.parent, ignore_errors=True)


def _check_space() -> None:
    """Raise ConfigError if the file system of a folder for temporary files is nearly full.

    Processes would end by a signal when they write to a mapped file for which there is no space.
    """
    for folder in dict.fromkeys((tempfile.gettempdir(), _parent())):
        if (free := shutil.disk_usage(folder).free) < LEAST_FREE:
            raise ConfigError(
                f"TMPDIR: {folder} has {free >> 20} MiB free; logs, sockets and metrics need {LEAST_FREE >> 20} MiB"
            )


def _parent() -> str:
    """Return the folder for temporary files, or `SHORT` if sockets below that folder would have too long paths."""
    folder = tempfile.gettempdir()
    return folder if len(os.fsencode(folder)) + LONGEST_NAME <= IPC_PATH_MAX_LEN else SHORT


def _in_use(lock: Path) -> bool:
    descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
