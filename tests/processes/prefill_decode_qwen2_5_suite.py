"""Qwen2.5-Omni with prefill and decode apart: both replicas export hidden states. `test_prefill_decode.py` runs it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.processes.prefill_decode_suite import (
    BACK_S,
    DECODE,
    PATIENT,
    PREFILL,
    SETTLED_S,
    back,
    each,
    environment,
    moved,
    nothing_is_kept,
    started,
)
from tests.processes.test_parity import CASES, SCHEDULES, TOLERANCE, check
from tests.processes.test_qwen2_5_omni import SEED, answers, checkpoint, golden, oracle, read
from tests.support.cluster import until
from tests.support.qwen2_5_oracle import Oracle
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.model_plugins.qwen2_5_omni.family import THINKER
from vllm_omni_ext.model_plugins.qwen2_5_omni.http import OPENING

__all__ = ["checkpoint", "environment", "oracle"]


@pytest.fixture(scope="module")
def pair(checkpoint: Path) -> Iterator[Any]:
    with started(checkpoint, PATIENT, thinker=THINKER) as omni:
        yield omni


def test_answers_equal_transformers(pair: Any, oracle: Oracle) -> None:
    """One after the other, and then at once, token by token."""
    before = moved(pair)
    for case in CASES.values():
        check(answers(pair, oracle, [case])[0], golden(oracle, case))
    for case, output in zip(
        CASES.values(), answers(pair, oracle, list(CASES.values()), SCHEDULES["one by one"]), strict=True
    ):
        check(output, golden(oracle, case))
    received = each(pair, "transfer_counters", DECODE)[f"{DECODE}/0"]
    assert moved(pair) > before and received["received"] >= len(CASES) and not received.get("failed_receives")
    steps = each(pair, "handoff_steps")
    assert steps[f"{PREFILL}/0"] > 0 and steps[f"{DECODE}/0"] > 0
    assert pair._omni.orchestrator.held() == 0
    assert until(lambda: nothing_is_kept(pair), SETTLED_S)


def test_a_text_read_out_equals_transformers(pair: Any, oracle: Oracle) -> None:
    text, before = "The quick brown fox.", moved(pair)
    codes, samples = pair._run(read(pair, text, "Chelsie"))
    wanted, sound = oracle.read_aloud(
        OPENING, text, voice="Chelsie", seed=SEED, talker_max_tokens=CASES["system"].frames
    )
    assert codes.tolist() == wanted.tolist()
    assert samples.shape == sound.shape and np.abs(samples - sound).max() <= TOLERANCE
    assert moved(pair) > before
    assert until(lambda: nothing_is_kept(pair), SETTLED_S)


@pytest.mark.parametrize("side", [PREFILL, DECODE])
def test_answers_equal_transformers_when_a_replica_dies(side: str, pair: Any, oracle: Oracle) -> None:
    cases, replica = list(CASES.values()), ReplicaId(side, 0)
    processes, pools = pair._deployment.processes, pair._omni.orchestrator.pools
    killed = processes()[replica].pid
    with ThreadPoolExecutor(1) as thread:
        got = thread.submit(answers, pair, oracle, cases)
        assert until(lambda: pools[side].in_flight(replica) > 0, SETTLED_S)
        os.kill(killed, signal.SIGKILL)
        outputs = got.result()
    for case, output in zip(cases, outputs, strict=True):
        check(output, golden(oracle, case))
    assert pair._omni.orchestrator.held() == 0
    assert until(lambda: back(pair) and processes()[replica].pid != killed, BACK_S)
    assert until(lambda: nothing_is_kept(pair), SETTLED_S)
