"""Transfers of KV cache between real engines. Mooncake listens on all addresses: the suites have only loopback."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.capabilities import needs
from tests.support.nested import run_suite
from vllm_omni_ext.disaggregation.parameters import CONNECTORS

SUITES = {"mooncake": "kv_transfer_suite.py", "nixl": "kv_transfer_nixl_suite.py"}
TIMEOUT_S = 3000
"""For machines that other programs keep busy."""


@pytest.mark.engine
@pytest.mark.extended
@pytest.mark.parametrize("connector", SUITES)
def test_blocks_reach_decode_or_decode_computes_them(connector: str, pytestconfig: pytest.Config) -> None:
    needs(f"library {CONNECTORS[connector].module}", "isolation")
    suite = Path(__file__).with_name(SUITES[connector])
    run_suite(suite, "--tb=short", timeout_s=TIMEOUT_S, config=pytestconfig)
