"""Traces that any API server finds."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from vllm_omni_ext.observability.request_trace import RequestTrace
from vllm_omni_ext.observability.trace_files import FOLDER, TraceFiles


def record(request_id: str, outcome: str = "finished") -> RequestTrace:
    return RequestTrace(request_id, ("text",), 0.0, time.time(), None, set(), ended=1.0, outcome=outcome)


def found(files: TraceFiles, request_id: str) -> dict[str, object] | None:
    kept = files.read(request_id)
    return None if kept is None else json.loads(kept)["otherData"]


def test_every_api_server_finds_a_trace(tmp_path: Path) -> None:
    servers = [TraceFiles(tmp_path, number, keep=3) for number in range(3)]
    servers[1].write(record("a"))
    for server in servers:
        kept = found(server, "a")
        assert kept is not None and kept["request_id"] == "a"
        assert server.read("b") is None


@pytest.mark.parametrize("keep", [0, 1, 3])
def test_oldest_own_traces_are_removed_first(tmp_path: Path, keep: int) -> None:
    mine, other = TraceFiles(tmp_path, 0, keep), TraceFiles(tmp_path, 1, keep)
    other.write(record("other"))
    for number in range(6):
        mine.write(record(f"r{number}"))
    kept = [number for number in range(6) if mine.read(f"r{number}")]
    assert kept == list(range(6 - max(1, keep), 6))
    assert other.read("other") and mine.read("other")


def test_the_newest_trace_of_a_repeated_id_is_kept(tmp_path: Path) -> None:
    files = TraceFiles(tmp_path, 0, keep=2)
    for request_id, outcome in (("a", "failed"), ("b", "finished"), ("a", "aborted"), ("c", "finished")):
        files.write(record(request_id, outcome))
    kept = files.read("a")
    assert kept is not None and "request: aborted" in kept.decode()
    assert files.read("b") is None and files.read("c")


def test_restarted_api_server_continues_its_trace_files(tmp_path: Path) -> None:
    before = TraceFiles(tmp_path, 0, keep=2)
    for request_id in ("a", "b"):
        before.write(record(request_id))
        os.utime(next(iter((tmp_path / FOLDER / "0").glob("*"))), (1, 1)) if request_id == "a" else None
    after = TraceFiles(tmp_path, 0, keep=2)
    assert after.read("a") and after.read("b")
    after.write(record("c"))
    assert after.read("a") is None and after.read("b") and after.read("c")
    assert len(list((tmp_path / FOLDER / "0").iterdir())) == 2


@pytest.mark.parametrize("request_id", ["../../etc/passwd", "a/b", "", "x" * 5000, "\ud800", "..", "ü"])
def test_a_request_id_of_any_characters_is_a_file_name(tmp_path: Path, request_id: str) -> None:
    files = TraceFiles(tmp_path, 0, keep=2)
    assert files.read(request_id) is None
    files.write(record(request_id))
    assert files.read(request_id) is not None
    assert len(list((tmp_path / FOLDER / "0").iterdir())) == 1
