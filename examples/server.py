"""Start `vllm serve MODEL --omni` as a child process, and end it with all processes that it has started."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType

import psutil

HOST = "127.0.0.1"
START_S = 600.0
STOP_S = 60.0
LOOK_EVERY_S = 0.2
LOOK_AT_PROCESSES_EVERY_S = 0.02
TAIL_LINES = 40


class ServerFailed(RuntimeError):
    """The server ended, or was not ready in time; the message has the end of its log."""


def free_port() -> int:
    """Return a port on which no process listens now."""
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        return int(sock.getsockname()[1])


def command() -> list[str]:
    """Return the `vllm` script in the folder of this Python or, if it is missing, `python -m vllm_omni_ext`."""
    script = Path(sys.executable).with_name("vllm")
    return [str(script)] if script.exists() else [sys.executable, "-m", "vllm_omni_ext"]


class Program:
    """A command that runs in a session (`setsid`) of its own.

    Args:
        words: the command and its arguments.
        log: file for the command's output.
    """

    def __init__(self, words: Sequence[str], log: Path) -> None:
        self.words = list(words)
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._seen: dict[int, psutil.Process] = {}

    def start(self) -> None:
        """Start the command, and return at once."""
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self.words, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """The id of the started process."""
        assert self._process is not None
        return self._process.pid

    def status(self) -> int | None:
        """Return the exit status; None while the command runs."""
        assert self._process is not None
        return self._process.poll()

    def processes(self) -> list[psutil.Process]:
        """Return the running processes of the command: itself, and all descendants that any call has found.

        So a descendant whose parent has ended is included.
        """
        if self._process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                tree = psutil.Process(self._process.pid)
                self._seen |= {process.pid: process for process in [tree, *tree.children(recursive=True)]}
        return [process for process in self._seen.values() if process.is_running() and alive(process)]

    def stop(self, number: signal.Signals = signal.SIGINT) -> list[psutil.Process]:
        """Send the signal `number` (default: SIGINT, as Ctrl-C does), and wait until all processes have ended.

        Returns:
            The processes that still ran after `STOP_S`, and were killed.
        """
        if self._process is None:
            return []
        known = self.processes()
        if self._process.poll() is None:
            self._process.send_signal(number)
        wait_for(known, STOP_S)
        left = self.processes()
        for process in left:
            process.kill()
        wait_for(left, STOP_S)
        self._process.wait()
        return left

    def tail(self) -> str:
        """Return the last lines of the log."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-TAIL_LINES:])


class Server(Program):
    """A running server. The context manager starts it, waits until it is ready, and ends it.

    Args:
        model: name or folder of the model.
        log: file for the output of the server.
        flags: more flags of `vllm serve`.
    """

    def __init__(self, model: str | Path, log: Path, flags: Sequence[str] = ()) -> None:
        self.port = free_port()
        self.startup_s = 0.0
        super().__init__(
            [*command(), "serve", str(model), "--omni", "--host", HOST, "--port", str(self.port), *flags], log
        )

    @property
    def base_url(self) -> str:
        """The base URL of the OpenAI API."""
        return f"http://{HOST}:{self.port}/v1"

    def __enter__(self) -> Server:
        started = time.monotonic()
        self.start()
        try:
            self.wait()
        except BaseException:
            self.stop()
            raise
        self.startup_s = time.monotonic() - started
        return self

    def healthy(self) -> bool:
        """Return whether `/health` answers 200."""
        try:
            with urllib.request.urlopen(f"http://{HOST}:{self.port}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def wait(self) -> None:
        """Wait until the server is healthy; ServerFailed if it ends before, or after `START_S`."""
        deadline = time.monotonic() + START_S
        while not self.healthy():
            if self.status() is not None:
                raise ServerFailed(f"the server ended with status {self.status()}:\n{self.tail()}")
            if time.monotonic() > deadline:
                raise ServerFailed(f"the server was not ready after {START_S:.0f} s:\n{self.tail()}")
            time.sleep(LOOK_EVERY_S)


def wait_for(processes: Iterable[psutil.Process], seconds: float) -> None:
    """Wait until none of the processes runs, at most `seconds`.

    A zombie does not count as running, because an orphan may stay a zombie for minutes.
    """
    deadline = time.monotonic() + seconds
    while any(map(alive, processes)) and time.monotonic() < deadline:
        time.sleep(LOOK_AT_PROCESSES_EVERY_S)


def alive(process: psutil.Process) -> bool:
    """Return whether a process still runs; a zombie has ended."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
