"""Log output of replicas: one file each, or the terminal."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from vllm_omni_ext.ids import ReplicaId

TAIL_LINES = 30
"""Number of lines of a log in an error."""

FATAL = ("EngineCore encountered a fatal error", "EngineCore failed to start")
"""vLLM logs one of these with the error that ends an engine, and then lines about the end itself."""

ERROR = " ERROR "
"""Level of these lines."""

_OUT, _ERR = 1, 2


class Logs(Protocol):
    """The destination of the output of replicas."""

    where: str

    def of(self, replica: ReplicaId) -> contextlib.AbstractContextManager[None]:
        """Processes started inside the block write to this replica's log."""

    def path(self, replica: ReplicaId) -> Path | None:
        """The replica's file; None if it writes to the terminal."""

    def tail(self, replica: ReplicaId) -> str:
        """The end of the replica's log, for error messages."""

    def needed(self) -> bool:
        """Whether an error has named a file, or an engine has ended with an error."""


class TerminalLogs:
    """Replicas write to the terminal."""

    where = "on this terminal"

    def of(self, replica: ReplicaId) -> contextlib.AbstractContextManager[None]:
        """No redirection."""
        return contextlib.nullcontext()

    def path(self, replica: ReplicaId) -> None:
        """There is no file."""

    def tail(self, replica: ReplicaId) -> str:
        """A reference to the terminal: the log is above the error."""
        return "see its log lines above"

    def needed(self) -> bool:
        """There is no file."""
        return False


class FileLogs:
    """Each replica writes to a file in `folder`, which is created; an existing file is appended to.

    Attributes:
        shown: whether an error has named a file.
    """

    shown = False

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.where = f"in {folder}"

    def path(self, replica: ReplicaId) -> Path:
        """The replica's file."""
        return self._folder / f"{replica.stage}-{replica.index}.log"

    def needed(self) -> bool:
        """Whether an error has named a file, or an engine has ended with an error."""
        files = self._folder.glob("*.log")
        return self.shown or any(_is_fatal(file.read_text(errors="replace")) for file in files)

    def of(self, replica: ReplicaId) -> contextlib.AbstractContextManager[None]:
        """Processes started inside the block write to the replica's file, forked or spawned."""
        return output_to(self.path(replica))

    def tail(self, replica: ReplicaId) -> str:
        """The last lines of the error that has ended the engine, or else of the file."""
        self.shown = True
        path = self.path(replica)
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        return "\n".join([f"the end of its log ({path}):", *(f"  {line}" for line in excerpt(lines))])


def excerpt(lines: Sequence[str]) -> Sequence[str]:
    """Return the last lines of the last fatal error, or of everything if there is none."""
    begin = max((i for i, line in enumerate(lines) if _is_fatal(line)), default=None)
    if begin is None:
        return lines[-TAIL_LINES:]
    error = itertools.takewhile(lambda line: ERROR in f" {line}", lines[begin:])
    return list(error)[-TAIL_LINES:]


def _is_fatal(text: str) -> bool:
    return any(fatal in text for fatal in FATAL)


@contextlib.contextmanager
def output_to(path: Path) -> Iterator[None]:
    """Redirect standard output and error of this process to the end of a file; children inherit the redirection.

    The redirection works on file descriptors, so that it holds for forked and spawned children and for output of C
    code.
    """
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
