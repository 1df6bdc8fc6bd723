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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

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


@contextmanager
def served(model: str, name: str, flags: Sequence[str]) -> Iterator[str]:
    """Start the server, yield its URL, and end the server after the block.

    Args:
        model: as for `vllm serve`.
        name: of the topology, for errors.
        flags: more flags.

    Raises:
        ServerFailed: it did not start.
    """
    with socket.socket() as free:
        free.bind((HOST, 0))
        port = free.getsockname()[1]
    script = Path(sys.executable).with_name("vllm")
    command = [str(script)] if script.exists() else [sys.executable, "-m", "vllm_omni_ext"]
    words = [*command, "serve", model, "--omni", "--host", HOST, *flags, "--port", str(port)]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            if (problem := _problem(process, f"http://{HOST}:{port}/health/ready")) is not None:
                log.seek(0)
                raise ServerFailed(f"topology '{name}': {problem}:\n{log.read().decode(errors='replace')[-TAIL:]}")
            yield f"http://{HOST}:{port}/v1"
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # the server's children, too
                process.wait()


def _problem(process: subprocess.Popen[bytes], url: str) -> str | None:
    """Wait until the server is ready; return the reason if it does not become ready."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        try:
            urllib.request.urlopen(url, timeout=10).close()
            return None
        except OSError:  # not listening yet, or 503
            pass
        try:
            return f"the server ended with exit status {process.wait(LOOK_EVERY_S)}"
        except subprocess.TimeoutExpired:
            continue
    return f"not ready after {START_S:g} s"
