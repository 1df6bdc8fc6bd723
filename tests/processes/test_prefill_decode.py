"""Prefill and decode apart. Mooncake listens on all addresses: the suites run where there is only loopback."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.capabilities import needs
from tests.support.nested import run_suite
from vllm_omni_ext.disaggregation.parameters import CONNECTORS

SUITES = {
    "prefill_decode_suite.py": "mooncake",
    "prefill_decode_bagel_suite.py": "mooncake",
    "prefill_decode_qwen2_5_suite.py": "mooncake",
    "prefill_decode_server_suite.py": "mooncake",
    "prefill_decode_nixl_suite.py": "nixl",
    "prefill_decode_ranks_suite.py": "mooncake",
}
EXTENDED = ("prefill_decode_nixl_suite.py", "prefill_decode_qwen2_5_suite.py", "prefill_decode_ranks_suite.py")
TIMEOUT_S = 3000
"""For machines that other programs keep busy."""


@pytest.mark.engine
@pytest.mark.parametrize(
    "suite", [pytest.param(name, marks=pytest.mark.extended if name in EXTENDED else ()) for name in SUITES]
)
def test_answers_equal_those_of_one_engine(suite: str, pytestconfig: pytest.Config) -> None:
    needs(f"library {CONNECTORS[SUITES[suite]].module}", "isolation")
    run_suite(Path(__file__).with_name(suite), "-x", timeout_s=TIMEOUT_S, config=pytestconfig)
