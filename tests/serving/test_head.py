"""How the head ends its API servers, and how it reports a port in use."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from typing import Any

import pytest

from vllm_omni_ext.cli.args import parse_serve
from vllm_omni_ext.serving import server
from vllm_omni_ext.serving.server import end_gently


class Process:
    """Ends a number of seconds after SIGTERM; None: never."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self.sentinel, self._end = os.pipe()
        self.ended = threading.Event()

    def is_alive(self) -> bool:
        return not self.ended.is_set()

    def terminate(self) -> None:
        if self._seconds is not None:
            threading.Timer(self._seconds, self._exit).start()

    def _exit(self) -> None:
        self.ended.set()
        os.close(self._end)


def test_shutdown_waits_for_all_processes_together_up_to_a_limit() -> None:
    processes, dead = [Process(0.05), Process(0.3), Process(0.3)], Process(None)
    dead.ended.set()
    before = time.monotonic()
    end_gently([*processes, dead], 20)
    assert 0.3 <= time.monotonic() - before < 10
    assert not any(process.is_alive() for process in processes)
    slow, quick = Process(None), Process(0.0)
    end_gently([slow, quick], 0.2)
    assert slow.is_alive() and not quick.is_alive()
    for process in (*processes, dead, slow, quick):
        os.close(process.sentinel)


def test_a_port_in_use_is_reported_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        args = parse_serve(["m", "--omni", "--host", "127.0.0.1", "--port", str(port)])
        plan: Any = None
        assert server.serve(plan, args) == server.FAILED
    said = f"error: the server cannot listen at --host 127.0.0.1 --port {port}: Address already in use\n"
    assert capsys.readouterr().err == said
