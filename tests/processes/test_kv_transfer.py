"""Prefill and decode over Mooncake with real engines. Its engine listens on all interfaces: only loopback can be
reached where the suite runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.connectors.test_mooncake import ISOLATED, unavailable

SUITE = Path(__file__).with_name("kv_transfer_suite.py")
TIMEOUT_S = 500

pytestmark = pytest.mark.engine


def test_the_suite() -> None:
    if reason := unavailable():
        pytest.skip(reason)
    run = subprocess.run(
        [*ISOLATED, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", str(SUITE)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
