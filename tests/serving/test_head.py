"""How the head reports a port in use."""

from __future__ import annotations

import signal
import socket
from typing import Any

import pytest

from vllm_omni_ext.cli.args import parse_serve
from vllm_omni_ext.serving import server


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
