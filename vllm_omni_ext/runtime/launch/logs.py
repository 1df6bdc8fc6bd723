"""Directs the log output of each replica to its own file or to the terminal."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from vllm_omni_ext.ids import ReplicaId

TAIL_LINES = 30
"""Most lines of a log in an error message."""

FATAL = ("EngineCore encountered a fatal error", "EngineCore failed to start")
"""Texts of the lines with which vLLM logs the error that ends an engine. Lines about the shutdown follow."""

ERROR = " ERROR "
"""Log level in the lines of an error in vLLM's log."""

_OUT, _ERR = 1, 2


class Logs:
    """Directs each replica's output to a file in `folder`, which is created; None: to the terminal.

    An existing file is appended to.

    Attributes:
        where: location of the logs, for messages.
    """

    def __init__(self, folder: Path | None = None) -> None:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._named = False
        self.where = "on this terminal" if folder is None else f"in {folder}"

    def path(self, replica: ReplicaId) -> Path | None:
        """Return the path of a replica's log file; None if the replica writes to the terminal."""
        return None if self._folder is None else self._folder / f"{replica.stage}-{replica.index}.log"

    def of(self, replica: ReplicaId) -> contextlib.AbstractContextManager[None]:
        """Return a context manager. Processes that are started inside its block write to this replica's log."""
        path = self.path(replica)
        return contextlib.nullcontext() if path is None else output_to(path)

    def tail(self, replica: ReplicaId) -> str:
        """Return text for an error message: the last lines of the error that ended the engine, or else of the log."""
        if (path := self.path(replica)) is None:
            return "see its log lines above"
        self._named = True
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        return "\n".join([f"the end of its log ({path}):", *(f"  {line}" for line in excerpt(lines))])

    def needed(self) -> bool:
        """Return whether the logs must be kept: a message names a log file, or an engine has ended with an error."""
        files = () if self._folder is None else self._folder.glob("*.log")
        return self._named or any(_is_fatal(file.read_text(errors="replace")) for file in files)


def excerpt(lines: Sequence[str]) -> Sequence[str]:
    """Return the last lines of the last fatal error, or of all `lines` if there is none."""
    begin = max((i for i, line in enumerate(lines) if _is_fatal(line)), default=None)
    if begin is None:
        return lines[-TAIL_LINES:]
    error = itertools.takewhile(lambda line: ERROR in f" {line}", lines[begin:])
    return list(error)[-TAIL_LINES:]


def _is_fatal(text: str) -> bool:
    return any(fatal in text for fatal in FATAL)


@contextlib.contextmanager
def output_to(path: Path) -> Iterator[None]:
    """Append this process's standard output and error to a file inside the block, also those of C code and children."""
    _flush()
    kept = {number: os.dup(number) for number in (_OUT, _ERR)}
    try:
        with path.open("ab") as log:
            for number in kept:
                os.dup2(log.fileno(), number)
        yield
    finally:
        _flush()
        for number, before in kept.items():
            os.dup2(before, number)
            os.close(before)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
