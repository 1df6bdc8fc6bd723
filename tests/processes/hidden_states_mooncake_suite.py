"""Hidden states over Mooncake, whose engine listens on all addresses. `test_hidden_states.py` runs it."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm import LLM

from tests.processes.test_hidden_states import MEDIA, SIZE, parity
from tests.processes.test_parity import CASES, golden
from tests.support.oracle import Oracle

pytestmark = pytest.mark.engine


def test_answers_to_media_equal_transformers(tiny: Path, oracle: Oracle) -> None:
    connector = {"name": "mooncake", "capacity_bytes": 64 << 20}
    with LLM(str(tiny), omni=True, connectors={"hidden_states": connector}, **SIZE) as omni:
        parity(omni, oracle, {name: golden(oracle, CASES[name]) for name in MEDIA})
