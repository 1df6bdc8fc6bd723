"""Private folders of deployments, and the removal of those whose processes are all gone.

A deployment that was killed leaves its folder. Each holds a file that is locked as long as a process of the deployment
lives; the system drops the lock with the last of them, whatever ended it, and the next start removes the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "omni-"

LOCK = "lock"
"""File name of the lock. It gets this name once it is locked: a folder without it is one that is being made."""


class PrivateFolder:
    """A new folder for sockets, logs and temporary files that nobody else can read.

    Processes forked from this one keep it in use too.

    Attributes:
        path: where it is.
    """

    def __init__(self) -> None:
        remove_abandoned()
        self.path = tempfile.mkdtemp(prefix=PREFIX)
        unlocked = Path(self.path, f"{LOCK}.new")
        self._lock: int | None = os.open(unlocked, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unlocked.rename(unlocked.with_name(LOCK))

    def remove(self) -> None:
        """Remove it with all that is in it; a second call does nothing."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None


def remove_abandoned() -> None:
    """Remove this user's folders of deployments of which no process lives."""
    for lock in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{LOCK}"):
        with contextlib.suppress(OSError):  # another's, in use, or removed by somebody else at this moment
            if lock.parent.lstat().st_uid == os.getuid() and not _in_use(lock):
                shutil.rmtree(lock.parent, ignore_errors=True)


def _in_use(lock: Path) -> bool:
    descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
