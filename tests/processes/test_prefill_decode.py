"""Prefill and decode apart. Mooncake listens on all interfaces: the suites run where there is only loopback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.connectors.test_mooncake import ISOLATED, unavailable
from vllm_omni_ext.disaggregation.parameters import CONNECTORS

pytestmark = pytest.mark.engine

HERE = Path(__file__).parent
SUITES = {
    "prefill_decode_suite.py": "mooncake",
    "prefill_decode_server_suite.py": "mooncake",
    "prefill_decode_nixl_suite.py": "nixl",
}
TIMEOUT_S = 3000
"""For machines that other programs keep busy."""


@pytest.mark.parametrize("suite", SUITES)
def test_the_suite(suite: str) -> None:
    if reason := unavailable(CONNECTORS[SUITES[suite]].module):
        pytest.skip(reason)
    run = subprocess.run(
        [*ISOLATED, sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(HERE / suite)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
