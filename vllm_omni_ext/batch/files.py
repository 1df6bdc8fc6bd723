"""Replaces files of the folder of batches as a whole, and removes new files that killed processes have left."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO

NEW = ".new"
"""Suffix of a file that replaces another one when it is complete. Its writer holds a lock of it."""


@contextlib.contextmanager
def replaced(path: Path, *, synced: bool = True) -> Iterator[IO[bytes]]:
    """Yield a new file that replaces `path` at the end of the `with` block; an exception in the block removes it.

    Args:
        synced: the new file's bytes are on the disk before it replaces `path`. Otherwise `path` may be empty after a
            power failure.
    """
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}{NEW}")
    with _locked(temporary) as file:
        try:
            yield file
            file.flush()
            if synced:
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def remove_abandoned(folder: Path) -> None:
    """Remove the new files of a folder whose lock no live process holds."""
    for path in folder.glob(f"*{NEW}"):
        with contextlib.suppress(FileNotFoundError, BlockingIOError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def _locked(path: Path) -> IO[bytes]:
    while True:
        file = path.open("wb")
        fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()  # another process has removed it as abandoned before it was locked
