"""Prefill and decode apart. Mooncake listens on all interfaces: the suites run where there is only loopback."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.capabilities import needs
from tests.support.nested import run_suite
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
    needs(f"library {CONNECTORS[SUITES[suite]].module}", "isolation")
    run_suite(HERE / suite, "-x", timeout_s=TIMEOUT_S)
