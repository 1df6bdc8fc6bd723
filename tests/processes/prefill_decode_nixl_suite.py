"""Prefill and decode on replicas of their own over NIXL, through all stages; `test_prefill_decode.py` runs it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.processes.prefill_decode_suite import (
    DECODE,
    MEDIA,
    PREFILL,
    SETTLED_S,
    count_encoder,
    each,
    encoder_steps,
    environment,
    nothing_is_kept,
    started,
    under_load,
)
from tests.processes.test_parity import answer, check
from tests.support.cluster import until
from tests.support.oracle import Golden, Oracle

__all__ = ["environment"]

SETTINGS = {"connector": "nixl", "kv_retention_s": 10.0}
SOME = ["text", "turns", "audio", "two_images_and_audio", "long_prompt", "long_media_prompt", "one_token"]


@pytest.fixture(scope="module")
def pair(tiny: Path) -> Iterator[Any]:
    """One replica of each side; decode's tokens and both encoders are counted."""
    with started(tiny, 1, 1, SETTINGS) as omni:
        omni.collective_rpc(count_encoder, targets=["thinker"])
        omni.collective_rpc(count_tokens, targets=[DECODE])
        yield omni


def count_tokens(worker: Any) -> None:
    """Count the tokens of all steps."""
    step = worker.execute_model
    worker.computed = 0

    def counted(scheduled: Any) -> Any:
        worker.computed += scheduled.total_num_scheduled_tokens
        return step(scheduled)

    worker.execute_model = counted


def computed_tokens(worker: Any) -> int:
    return worker.computed


def test_answers_are_as_from_one_replica(pair: Any, oracle: Oracle, expected: dict[str, Golden]) -> None:
    """And decode has computed nothing of the prompts but their last tokens."""
    for name, output in zip(SOME, answer(pair, oracle, SOME), strict=True):
        check(output, expected[name])
    computed, written = each(pair, computed_tokens, DECODE), sum(len(expected[name].thinker_ids) for name in SOME)
    assert computed == {f"{DECODE}/0": written}
    steps = each(pair, encoder_steps)
    assert steps[f"{PREFILL}/0"] > 0 and steps[f"{DECODE}/0"] == 0
    assert until(lambda: nothing_is_kept(pair), SETTLED_S)


def handed(omni: Any) -> int:
    """Prompts that replicas which are there have computed for others."""
    return sum(pair.handed for pair in omni._omni.orchestrator.pairs())


def test_the_only_prefill_replica_dies(pair: Any, oracle: Oracle, expected: dict[str, Golden]) -> None:
    """Decode computes the prompts until it is back, and fetches them of the next one."""
    under_load(pair, oracle, expected, f"{PREFILL}/0")
    before = handed(pair)
    check(answer(pair, oracle, MEDIA[:1])[0], expected[MEDIA[0]])
    assert handed(pair) == before + 1
