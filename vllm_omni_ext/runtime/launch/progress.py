"""Progress of a deployment's start on the terminal: the progress of replicas, and a line when a stage is ready."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from rich.console import Console

from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.topology.plan import Plan
from vllm_omni_ext.wire.loading import Loading, decode

EVERY_S = 15.0
"""Minimum interval between progress lines when there is no terminal."""

LOOK_S = 1.0
"""Interval at which the size of a download is read on a terminal."""

GIB, MIB = 1 << 30, 1 << 20

Show = Callable[[str], None]


class Progress:
    """Reports the ready stages, and the progress of the loading ones.

    Methods may be called by any thread; one thread at a time emits a line.

    Args:
        tell: receives one line.
        clock: seconds since the command began.
        every_s: minimum interval between progress lines, in seconds.
    """

    def __init__(
        self, plan: Plan, tell: Callable[[str], None], clock: Callable[[], float], *, every_s: float = EVERY_S
    ) -> None:
        self._tell = tell
        self._clock = clock
        self._every_s = every_s
        self._pending = {stage.name: {replica.id for replica in stage.replicas} for stage in plan.stages}
        self._loading: dict[str, Loading | None] = {}
        """The last report of every replica that is starting."""
        self._told = time.monotonic()
        self._show: Show | None = None
        self.speaking = threading.RLock()
        """Held while a line is emitted, and while this process's output is redirected."""

    def starting(self, logs: str) -> None:
        """Replicas are being started; `logs` names the place of their logs."""
        here = ((stage, len(replicas)) for stage, replicas in self._pending.items() if replicas)
        stages = ", ".join(f"{stage} ({_count(replicas)})" for stage, replicas in here)
        with self.speaking:
            self._tell(f"starting {stages}; logs {logs}")

    def begun(self, replica: ReplicaId) -> None:
        """A replica's process is being started: its reports count from now on."""
        with self.speaking:
            self._loading[str(replica)] = None

    def ready(self, replica: ReplicaId) -> None:
        """A replica is ready; the last one of a stage emits a line."""
        with self.speaking:
            self.over(replica)
            pending = self._pending[replica.stage]
            pending.discard(replica)
            if not pending:
                self._tell(f"{replica.stage} ready after {self._clock():.1f} s")

    def over(self, replica: ReplicaId) -> None:
        """A replica is ready or has ended: its loading is not reported any more."""
        with self.speaking:
            self._loading.pop(str(replica), None)

    def loading(self, report: Loading | None = None) -> None:
        """Handle a replica's report, or (None) that time has passed without a report."""
        with self.speaking:
            if report is not None and report.replica in self._loading:
                self._loading[report.replica] = report
            if not any(self._loading.values()):
                return
            if self._show is not None:
                self._show(self._line())
            elif time.monotonic() - self._told >= self._every_s:
                self._told = time.monotonic()
                self._tell(self._line())

    def _line(self) -> str:
        reports = (report for _, report in sorted(self._loading.items()))
        return "; ".join(text_of(report) for report in reports if report is not None)

    @contextlib.contextmanager
    def shown(self, show: Show | None) -> Iterator[None]:
        """Inside the block, `show` is called with the progress whenever it changes; None: lines are emitted instead."""
        self._show = show
        try:
            yield
        finally:
            self._show = None

    @property
    def look_s(self) -> float | None:
        """Limit of the wait for a report before the progress is shown again, in seconds."""
        if not any(self._loading.values()):
            return None
        return self._every_s if self._show is None else LOOK_S


def text_of(report: Loading) -> str:
    """A report as text."""
    if report.phase == "downloading":
        return f"{report.replica}: downloading, {_size(downloaded(report.folder))} so far"
    if report.phase == "warming up":
        return f"{report.replica}: weights loaded, warming up"
    if not report.total:
        return f"{report.replica}: loading"
    unit, name = (GIB, "GiB") if report.total >= GIB else (MIB, "MiB")
    part = f"{report.loaded / unit:.1f} of {report.total / unit:.1f} {name}"
    return f"{report.replica}: loading {part} ({100 * report.loaded // report.total} %)"


def downloaded(folder: str) -> int:
    """Bytes that the hub's client has written for a model, unfinished files included."""
    found = 0
    for file in Path(folder, "blobs").glob("*"):
        with contextlib.suppress(OSError):  # renamed in the meantime
            found += file.stat().st_size
    return found


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.1f} MiB"


def _count(replicas: int) -> str:
    return "1 replica" if replicas == 1 else f"{replicas} replicas"


class Listener:
    """Receives the start-up reports of replicas in its own thread until it is closed.

    Args:
        folder: private directory, in which the socket is made.
    """

    def __init__(self, folder: str, progress: Progress) -> None:
        self.path = os.path.join(folder, "loading")
        self._progress = progress
        self._closing = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.path)
        self._thread = threading.Thread(target=self._listen, name="omni-progress", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread; a second call does nothing."""
        if self._closing:
            return
        self._closing = True
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as waker:
            waker.sendto(b"", self.path)
        self._thread.join()
        self._socket.close()

    def _listen(self) -> None:
        while not self._closing:
            self._socket.settimeout(self._progress.look_s)
            try:
                self._progress.loading(decode(self._socket.recv(4096)))
            except TimeoutError:
                self._progress.loading()
            except msgspec.MsgspecError:
                continue


@contextlib.contextmanager
def spinner(text: str) -> Iterator[Show | None]:
    """Animate a sign on a terminal while the block runs; yields a function that sets the text. None without a terminal.

    The sign uses a duplicated descriptor: the standard output is redirected at times while replicas are started.
    """
    if not Console().is_terminal:
        yield None
        return
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as terminal, Console(file=terminal).status(text) as status:
        yield status.update


def print_status(line: str) -> None:
    """Print a line for the operator: errors to stderr, others to stdout."""
    with contextlib.suppress(OSError):  # nothing reads the output any more
        # One write: the processes share the terminal, and another one could write before the end of the line.
        print(f"{line}\n", end="", file=sys.stderr if line.startswith("error") else sys.stdout, flush=True)
