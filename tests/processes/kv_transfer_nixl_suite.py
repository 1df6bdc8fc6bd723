"""Real prefill and decode engines over NIXL; `test_kv_transfer.py` runs it where only loopback can be reached."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.processes.kv_transfer_suite import BOUND_S, GREEDY, Pair, prompt
from tests.support.kv_engines import prefill
from tests.support.media import audio
from vllm_omni_ext.disaggregation.parameters import Settings, prefill_transfer
from vllm_omni_ext.ids import PREFILL

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

SETTINGS = Settings(connector="nixl", kv_retention_s=6.0)
HANDSHAKE_S = 5.0
"""vLLM's own time limit."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tiny: Path) -> AsyncIterator[Pair]:
    made = Pair(str(tiny), SETTINGS)
    yield made
    made.close()


async def computed(pair: Pair) -> int:
    return int(await pair.decode.ask("computed_tokens"))


@pytest.mark.parametrize("length", [3, 127, 128, 129, 700, 2000])
async def test_blocks_of_a_prompt_arrive(length: int, pair: Pair) -> None:
    asked = prompt(length)
    told = await prefill(pair.prefill, asked)
    before = await computed(pair)
    await pair.check(asked, told)
    assert await computed(pair) - before == GREEDY.max_tokens, "decode has computed more than the last prompt token"
    await pair.empty()


async def test_eight_at_once(pair: Pair) -> None:
    async def one(length: int) -> None:
        asked = prompt(length)
        await pair.check(asked, await prefill(pair.prefill, asked))

    await asyncio.gather(*(one(50 + 90 * i) for i in range(8)))
    await pair.empty()


async def test_the_encoder_runs_in_prefill_only(pair: Pair) -> None:
    tokens = pair.plain.llm.get_tokenizer().encode("<|audio_start|><|audio_pad|><|audio_end|>What do you hear?")
    asked = {"prompt_token_ids": tokens, "multi_modal_data": {"audio": [(audio(2.0, 1), 16000)]}}
    await pair.check(asked, await prefill(pair.prefill, asked))
    assert (await pair.prefill.ask("encoder_steps"), await pair.decode.ask("encoder_steps")) == (1, 0)
    await pair.empty()


WRONG: dict[str, dict[str, Any]] = {
    "no port": {"remote_port": None},
    "nobody there": {"remote_port": 9, "remote_engine_id": "nobody"},
    "unknown blocks": {"remote_block_ids": None},
    "meant for prefill": prefill_transfer("x"),
}


@pytest.mark.parametrize("case", WRONG)
async def test_decode_does_without_what_it_cannot_get(case: str, pair: Pair) -> None:
    asked = prompt()
    told = await prefill(pair.prefill, asked)
    await pair.check(asked, {**told, **WRONG[case]}, bound_s=HANDSHAKE_S + BOUND_S)
    await pair.decode.empty()
    await pair.decode.reject(told)
    await pair.empty()


async def test_blocks_that_are_refused_are_freed(pair: Pair) -> None:
    told = await prefill(pair.prefill, prompt())
    await pair.decode.reject(told)
    await pair.empty()


async def test_a_prefill_that_is_killed_and_started_again(pair: Pair) -> None:
    first = pair.start(PREFILL)
    try:
        await pair.check(known := prompt(), await prefill(first, known))
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
