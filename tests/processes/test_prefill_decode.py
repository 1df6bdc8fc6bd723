"""Prefill and decode apart. Mooncake listens on all interfaces: the suites run where there is only loopback."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.connectors.test_mooncake import ISOLATED

pytestmark = pytest.mark.engine

HERE = Path(__file__).parent
TIMEOUT_S = 900


@pytest.mark.parametrize("suite", ["prefill_decode_suite.py", "prefill_decode_server_suite.py"])
def test_the_suite(suite: str) -> None:
    probe = subprocess.run([sys.executable, "-c", "import mooncake.engine"], capture_output=True, text=True)
    if probe.returncode:
        pytest.skip(f"no mooncake here: {probe.stderr.strip().splitlines()[-1]}")
    if not all(map(shutil.which, ("unshare", "ip"))) or subprocess.run([*ISOLATED, "true"]).returncode:
        pytest.skip("no network namespace can be made here")
    run = subprocess.run(
        [*ISOLATED, sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(HERE / suite)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
