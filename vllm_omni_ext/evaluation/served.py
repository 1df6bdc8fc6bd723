"""A `vllm serve MODEL --omni` that runs for one topology of an evaluation."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

from vllm_omni_ext.errors import OmniError

HOST = "127.0.0.1"
START_S = 3600.0
"""Limit of a start, long enough for a large model on a slow disk; the server's own limits end it earlier."""
STOP_S = 120.0
LOOK_EVERY_S = 0.5
TAIL = 2000
"""Characters of the log in an error."""


class ServerFailed(OmniError):
    """The server ended, or was not ready in time; the message has the end of its log."""


class Served:
    """Starts the server on entering, which returns its URL, and ends it on leaving.

    Args:
        model: as for `vllm serve`.
        name: of the topology, for errors.
        flags: more flags.

    Raises:
        ServerFailed: it did not start.
    """

    def __init__(self, model: str, name: str, flags: Sequence[str]) -> None:
        self._name, self._words = name, ["serve", model, "--omni", "--host", HOST, *flags]
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    def __enter__(self) -> str:
        with socket.socket() as free:
            free.bind((HOST, 0))
            port = free.getsockname()[1]
        script = Path(sys.executable).with_name("vllm")
        command = [str(script)] if script.exists() else [sys.executable, "-m", "vllm_omni_ext"]
        self._log = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [*command, *self._words, "--port", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            self._wait(f"http://{HOST}:{port}/health/ready")
        except BaseException:
            self._stop()
            raise
        return f"http://{HOST}:{port}/v1"

    def _wait(self, url: str) -> None:
        assert self._process is not None
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            try:
                urllib.request.urlopen(url, timeout=10).close()
                return
            except OSError:  # not listening yet, or 503
                pass
            try:
                status = self._process.wait(LOOK_EVERY_S)
            except subprocess.TimeoutExpired:
                continue
            raise ServerFailed(f"topology '{self._name}': the server ended with exit status {status}:\n{self._tail()}")
        raise ServerFailed(f"topology '{self._name}': not ready after {START_S:g} s:\n{self._tail()}")

    def _tail(self) -> str:
        assert self._log is not None
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-TAIL:]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        assert self._process is not None and self._log is not None
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)  # the server's children, too
            self._process.wait()
        self._log.close()
