"""The three stages on Model Runner V2, the runner of CUDA machines; `make test` runs one short request on it."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from examples.server import Server
from tests.gpu.run_once import v2_on_a_cpu
from tests.processes.test_headless import check_parity
from tests.support.cluster import LENGTH, STAGES, replicas
from tests.support.nested import run_suite
from tests.support.oracle import Golden, Oracle

pytestmark = pytest.mark.engine

HERE = Path(__file__).parent
TIMEOUT_S = 1500
"""For machines that other programs keep busy."""


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """For all processes that a test starts."""
    for name, value in v2_on_a_cpu().items():
        monkeypatch.setenv(name, value)


@pytest.mark.extended
def test_engines() -> None:
    run_suite(HERE / "v2_suite.py", "-x", timeout_s=TIMEOUT_S, isolated=False)


@pytest.mark.extended
@pytest.mark.needs("library mooncake.engine", "isolation")
def test_prefill_and_decode_apart() -> None:
    some = "eight_at_once or encoder_runs_on_prefill_only"
    run_suite(HERE / "prefill_decode_suite.py", "-x", "-k", some, timeout_s=TIMEOUT_S)


def where_libc_is(pid: int) -> str:
    """Address of a library in a process: a forked one has its parent's, a spawned one its own."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return next(line.split()[0] for line in maps if "/libc.so" in line)


def test_spawned_replicas(tiny: Path, tmp_path: Path, oracle: Oracle, expected: dict[str, Golden]) -> None:
    server = Server(tiny, tmp_path / "server.log", LENGTH)
    server.words = [
        sys.executable,
        str(HERE.parent / "support" / "spawned_server.py"),
        *server.words[server.words.index("serve") :],
    ]
    with server:
        places = {where_libc_is(int(found["pid"])) for found in replicas(server).values()}
        assert len(places - {where_libc_is(server.pid)}) == len(STAGES)
        check_parity(server, oracle, expected, ["few_frames"])  # interpreted kernels take a second a frame
        assert server.stop(signal.SIGTERM) == [] and server.status() == 0
