"""How the head reports a port in use, and the directory of its metrics."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from vllm_omni_ext.cli.args import parse_serve
from vllm_omni_ext.errors import ConfigError
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


def test_metrics_of_ended_processes_are_removed_at_the_start(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    for name in (f"counter_{ended.pid}.db", f"gauge_livesum_{ended.pid}.db", f"counter_{os.getpid()}.db", "notes.db"):
        (tmp_path / "metrics" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "metrics" / name).touch()
    server.prepare_metrics(str(tmp_path / "metrics"))
    assert sorted(os.listdir(tmp_path / "metrics")) == [f"counter_{os.getpid()}.db", "notes.db"]
    with pytest.raises(ConfigError, match=r"^PROMETHEUS_MULTIPROC_DIR: '.*/file/x' cannot be used: Not a directory$"):
        (tmp_path / "file").touch()
        server.prepare_metrics(str(tmp_path / "file" / "x"))
