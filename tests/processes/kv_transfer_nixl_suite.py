"""Real prefill and decode engines over NIXL; `test_kv_transfer.py` runs it where only loopback can be reached."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.processes.kv_transfer_suite import (
    BOUND_S,
    Pair,
    prompt,
    test_blocks_of_a_prompt_arrive,
    test_blocks_of_eight_prompts_at_once_arrive,
    test_the_encoder_runs_in_prefill_only,
)
from tests.support.kv_engines import prefill
from vllm_omni_ext.disaggregation.parameters import TransferSettings, prefill_transfer
from vllm_omni_ext.ids import PREFILL

__all__ = [
    "test_blocks_of_a_prompt_arrive",
    "test_blocks_of_eight_prompts_at_once_arrive",
    "test_the_encoder_runs_in_prefill_only",
]
pytestmark = [pytest.mark.engine, pytest.mark.extended, pytest.mark.asyncio(loop_scope="module")]

SETTINGS = TransferSettings(connector="nixl", kv_retention_s=6.0)
HANDSHAKE_S = 5.0
"""vLLM's own time limit."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tiny: Path) -> AsyncIterator[Pair]:
    made = Pair(str(tiny), SETTINGS)
    yield made
    made.close()


@pytest.fixture
def patient(pair: Pair) -> Pair:
    return pair


WRONG: dict[str, dict[str, Any]] = {
    "no port": {"remote_port": None},
    "nobody there": {"remote_port": 9, "remote_engine_id": "nobody"},
    "meant for prefill": prefill_transfer("x"),
}


@pytest.mark.parametrize("case", WRONG)
async def test_decode_computes_a_prompt_whose_blocks_cannot_be_fetched(case: str, pair: Pair) -> None:
    """Blocks that decode refuses are freed."""
    asked = prompt()
    told = await prefill(pair.prefill, asked)
    await pair.check(asked, {**told, **WRONG[case]}, bound_s=HANDSHAKE_S + BOUND_S)
    await pair.decode.empty()
    await pair.decode.reject(told)
    await pair.empty()


async def test_decode_computes_the_prompts_of_a_killed_prefill_engine(pair: Pair) -> None:
    first = pair.start(PREFILL)
    try:
        await pair.check(connecting := prompt(), await prefill(first, connecting))
        asked = prompt()
        told = await prefill(first, asked)
        first.signal(signal.SIGKILL)
        await pair.check(asked, told)
        await pair.decode.empty()
    finally:
        first.close()
    with pair.another(PREFILL) as successor:
        await pair.check(asked := prompt(), await prefill(successor, asked))
    await pair.empty()
