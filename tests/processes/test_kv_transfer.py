"""Prefill and decode with real engines, over each connector. Mooncake's engine listens on all interfaces: only loopback
can be reached where the suites run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.capabilities import needs
from tests.support.nested import run_suite
from vllm_omni_ext.disaggregation.parameters import CONNECTORS

SUITES = {"mooncake": "kv_transfer_suite.py", "nixl": "kv_transfer_nixl_suite.py"}
TIMEOUT_S = 3000
"""For machines that other programs keep busy."""

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("connector", CONNECTORS)
def test_the_suite(connector: str) -> None:
    needs(f"library {CONNECTORS[connector].module}", "isolation")
    run_suite(Path(__file__).with_name(SUITES[connector]), "--tb=short", timeout_s=TIMEOUT_S)
