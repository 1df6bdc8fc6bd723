"""Prefill and decode with real engines, over each connector. Mooncake's engine listens on all interfaces: only loopback
can be reached where the suites run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.connectors.test_mooncake import ISOLATED, unavailable
from vllm_omni_ext.disaggregation.parameters import CONNECTORS

SUITES = {"mooncake": "kv_transfer_suite.py", "nixl": "kv_transfer_nixl_suite.py"}
TIMEOUT_S = 3000
"""For machines that other programs keep busy."""

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("connector", CONNECTORS)
def test_the_suite(connector: str) -> None:
    if reason := unavailable(CONNECTORS[connector].module):
        pytest.skip(reason)
    suite = Path(__file__).with_name(SUITES[connector])
    run = subprocess.run(
        [*ISOLATED, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", str(suite)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
