"""Shows the progress of a deployment's start: the states of starting replicas, and a line when a stage is ready."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator

from rich.console import Console

from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.topology.plan import Plan

EVERY_S = 15.0
"""Seconds between two progress lines if the output is not a terminal."""

SHOWN_EVERY_S = 1.0
"""Seconds between two updates of the progress on a terminal."""

Show = Callable[[str], None]


class Progress:
    """Emits lines about ready stages, and shows the states of starting replicas. Any thread may call the methods.

    Args:
        tell: receives one line.
        clock: returns the seconds since the command began.
        every_s: interval between progress lines, in seconds.
    """

    def __init__(
        self, plan: Plan, tell: Callable[[str], None], clock: Callable[[], float], *, every_s: float = EVERY_S
    ) -> None:
        self._tell = tell
        self._clock = clock
        self._every_s = every_s
        self._pending = {stage.name: {replica.id for replica in stage.replicas} for stage in plan.stages}
        self._states: dict[str, tuple[str, float]] = {}
        """State, and time at which the start began (monotonic seconds), by starting replica."""
        self._show: Show | None = None
        self.speaking = threading.RLock()
        """Lock, held while a line is emitted, and while this process's output is redirected into a replica's log."""

    def starting(self, logs: str) -> None:
        """Emit a line with the stages that are starting; `logs` is the location of their logs."""
        here = ((stage, len(replicas)) for stage, replicas in self._pending.items() if replicas)
        stages = ", ".join(f"{stage} ({_count(replicas)})" for stage, replicas in here)
        with self.speaking:
            self._tell(f"starting {stages}; logs {logs}")

    def begun(self, replica: ReplicaId) -> None:
        """Record that a replica's process is being started."""
        with self.speaking:
            self._states[str(replica)] = ("starting", time.monotonic())

    def reported(self, replica: str, state: str) -> None:
        """Record the state that a starting replica has sent, e.g. "loading weights"."""
        with self.speaking:
            if replica in self._states:
                self._states[replica] = (state, self._states[replica][1])

    def ready(self, replica: ReplicaId) -> None:
        """Record that a replica is ready; emit a line if it was the last one of its stage."""
        with self.speaking:
            self.over(replica)
            pending = self._pending[replica.stage]
            pending.discard(replica)
            if not pending:
                self._tell(f"{replica.stage} ready after {self._clock():.1f} s")

    def over(self, replica: ReplicaId) -> None:
        """Stop showing the state of a replica that is ready or has ended."""
        with self.speaking:
            self._states.pop(str(replica), None)

    def show(self) -> None:
        """Show the states of the starting replicas: one line each on a terminal, else one line."""
        with self.speaking:
            now = time.monotonic()
            lines = [f"{name}: {state}, {now - since:.0f} s" for name, (state, since) in sorted(self._states.items())]
            if lines and self._show is not None:
                self._show("\n".join(lines))
            elif lines:
                self._tell("; ".join(lines))

    @contextlib.contextmanager
    def shown(self, show: Show | None) -> Iterator[None]:
        """Pass the progress to `show` inside the block; None: emit lines instead."""
        self._show = show
        try:
            yield
        finally:
            self._show = None

    @property
    def every_s(self) -> float:
        """Interval at which the progress is to be shown, in seconds."""
        return self._every_s if self._show is None else SHOWN_EVERY_S


def _count(replicas: int) -> str:
    return "1 replica" if replicas == 1 else f"{replicas} replicas"


class Listener:
    """Receives the states of starting replicas at a Unix socket in `folder`, and shows them, until `close`."""

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
        shown = time.monotonic()
        while not self._closing:
            left = shown + self._progress.every_s - time.monotonic()
            if left <= 0:
                shown = time.monotonic()
                self._progress.show()
                continue
            self._socket.settimeout(left)
            with contextlib.suppress(TimeoutError):
                replica, _, state = self._socket.recv(4096).decode(errors="replace").partition(" ")
                self._progress.reported(replica, state)


@contextlib.contextmanager
def spinner(text: str) -> Iterator[Show | None]:
    """Show a spinner with a text while the block runs.

    Yields a function that sets the text, or None if the output is not a terminal. The spinner writes to a duplicate of
    the standard output, which is redirected while replicas are started.
    """
    if not Console().is_terminal:
        yield None
        return
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as terminal, Console(file=terminal).status(text) as status:
        yield status.update


def print_status(line: str) -> None:
    """Print a line for the operator: errors to stderr, others to stdout."""
    with contextlib.suppress(OSError):  # nothing reads the output any more
        # One write, because another process could write to the shared terminal between the text and the line's end.
        print(f"{line}\n", end="", file=sys.stderr if line.startswith("error") else sys.stdout, flush=True)
