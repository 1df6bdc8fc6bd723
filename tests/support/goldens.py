"""Results of Transformers, computed once for all processes that one run of pytest starts: some take many seconds."""

from __future__ import annotations

import fcntl
import hashlib
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

FOLDER = "OMNI_TEST_GOLDENS"
"""Environment variable: where the results lie. Test processes inherit it from the first one."""


def begin() -> str | None:
    """Make the folder, unless a process above this one has made it; returns its path if it was made here."""
    if FOLDER in os.environ:
        return None
    os.environ[FOLDER] = tempfile.mkdtemp(prefix="goldens-")
    return os.environ[FOLDER]


def end(folder: str | None) -> None:
    """Remove a folder that was made here."""
    if folder is not None:
        os.environ.pop(FOLDER, None)
        shutil.rmtree(folder, ignore_errors=True)


def once(compute: Callable[[], T], *key: Any) -> T:
    """Return the result of `compute`, which the processes of a run call once for each key.

    Args:
        compute: gives the same for the same key; the result can be pickled.
        key: can be pickled. A key whose pickled form varies is only computed more often.
    """
    path = Path(os.environ[FOLDER], hashlib.sha256(pickle.dumps(key)).hexdigest())
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            path.write_bytes(pickle.dumps(compute()))
        return pickle.loads(path.read_bytes())  # type: ignore[no-any-return]
