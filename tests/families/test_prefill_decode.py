"""A family of another package with prefill and decode replicas. Only loopback: Mooncake listens on all addresses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.capabilities import needs
from tests.support.nested import run_suite
from vllm_omni_ext.disaggregation.parameters import CONNECTORS

TIMEOUT_S = 1200
"""For machines that other programs keep busy."""


@pytest.mark.engine
@pytest.mark.extended
def test_ids_of_a_split_frontend_equal_those_of_an_undivided_one(pytestconfig: pytest.Config) -> None:
    needs(f"library {CONNECTORS['mooncake'].module}", "isolation")
    run_suite(Path(__file__).with_name("prefill_decode_suite.py"), "-x", timeout_s=TIMEOUT_S, config=pytestconfig)
