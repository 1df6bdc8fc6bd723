"""What the person who starts a deployment sees of it: how far each replica is, and a line when a stage is ready."""

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
from vllm_omni_ext.topology.shape import Plan
from vllm_omni_ext.wire.loading import Loading, decode

EVERY_S = 15.0
"""Without a terminal, a line at most so often says how far the replicas are."""

LOOK_S = 1.0
"""On a terminal the size of a download is looked at so often."""

GIB, MIB = 1 << 30, 1 << 20

Show = Callable[[str], None]


class Progress:
    """Says which stages are ready, and how far those are that load.

    Methods may be called by any thread; lines are told by one at a time.

    Args:
        tell: takes one line.
        clock: seconds since the command began.
        every_s: at most so often a line tells how far the replicas are, in seconds.
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
        """Held while a line is told; also while this process's output goes somewhere else."""

    def starting(self, logs: str) -> None:
        """Replicas are being started; `logs` says where they write."""
        here = ((stage, len(replicas)) for stage, replicas in self._pending.items() if replicas)
        stages = ", ".join(f"{stage} ({_count(replicas)})" for stage, replicas in here)
        with self.speaking:
            self._tell(f"starting {stages}; logs {logs}")

    def begun(self, replica: ReplicaId) -> None:
        """A replica's process is being started: what it says counts from now on."""
        with self.speaking:
            self._loading[str(replica)] = None

    def ready(self, replica: ReplicaId) -> None:
        """A replica is ready; the last one of a stage makes a line."""
        with self.speaking:
            self.over(replica)
            pending = self._pending[replica.stage]
            pending.discard(replica)
            if not pending:
                self._tell(f"{replica.stage} ready after {self._clock():.1f} s")

    def over(self, replica: ReplicaId) -> None:
        """A replica is ready or has ended: nothing more is said of its loading."""
        with self.speaking:
            self._loading.pop(str(replica), None)

    def loading(self, report: Loading | None = None) -> None:
        """A replica says how far it is, or (None) time has passed in which nobody has said anything."""
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
        """Inside the block, `show` is given how far the replicas are, whenever that changes; None: lines are told."""
        self._show = show
        try:
            yield
        finally:
            self._show = None

    @property
    def look_s(self) -> float | None:
        """How long to wait for a replica to say something before what is known is said again, in seconds."""
        if not any(self._loading.values()):
            return None
        return self._every_s if self._show is None else LOOK_S


def text_of(report: Loading) -> str:
    """A report as people read it."""
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
        with contextlib.suppress(OSError):  # renamed at this moment
            found += file.stat().st_size
    return found


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.1f} MiB"


def _count(replicas: int) -> str:
    return "1 replica" if replicas == 1 else f"{replicas} replicas"


class Listener:
    """Takes what replicas say of their start, in a thread of its own, until it is closed.

    Args:
        folder: private directory; the socket is made there.
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
        """Stop; a second call does nothing."""
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
    """A moving sign while the block runs, on a terminal; what it gives changes the text. None and nothing elsewhere.

    It writes to a descriptor of its own: the standard output is redirected for moments while replicas are started.
    """
    if not Console().is_terminal:
        yield None
        return
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as terminal, Console(file=terminal).status(text) as status:
        yield status.update
