"""Prefill and decode apart with tensor parallelism, over Mooncake; `test_prefill_decode.py` runs it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.processes import prefill_decode_suite
from tests.processes.conftest import MAX_LEN, STEP_TOKENS
from tests.processes.prefill_decode_suite import BACK_S, BLOCK, DECODE, EIGHT, PATIENT, PREFILL, SETTLED_S, back
from tests.processes.test_parity import CASES, answer, check, golden
from tests.support.cluster import until
from tests.support.oracle import Golden, Oracle
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.runtime.supervise import process_watcher

pytestmark = pytest.mark.extended
environment = prefill_decode_suite.environment

RANKS = 2
NAMES = ["text", "turns", "audio", "two_images_and_audio", "long_prompt", "long_media_prompt", "one_token"]


@pytest.fixture(scope="module")
def even(divisible: Path) -> Oracle:
    return Oracle(divisible)


@pytest.fixture(scope="module")
def wanted(even: Oracle) -> dict[str, Golden]:
    return {name: golden(even, CASES[name]) for name in {*NAMES, *EIGHT}}


def ranks(count: int, replicas: int = 1) -> dict[str, Any]:
    return {"replicas": replicas, "engine": {"tensor_parallel_size": count}}


LAYOUTS = {
    "2 to 2 x 2": {"prefill": ranks(RANKS), "decode": ranks(RANKS, replicas=2)},
    "1 to 2": {"prefill": ranks(1), "decode": ranks(RANKS)},
}


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(request: pytest.FixtureRequest, divisible: Path) -> Iterator[Any]:
    """Prefill and decode replicas with these numbers of ranks."""
    from vllm import LLM

    split = {"engine": {"block_size": BLOCK}, "prefill_decode": {**PATIENT, **LAYOUTS[request.param]}}
    size = {"max_model_len": MAX_LEN, "max_num_batched_tokens": STEP_TOKENS}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_watcher, "RESTART_BACKOFF_S", 0.1)
        omni = LLM(str(divisible), omni=True, stage_overrides={"thinker": split}, **size)
    with omni:
        yield omni


def handed(omni: Any) -> int:
    """Prompts that the present replicas have computed for others."""
    return sum(edge.handed for edge in omni._omni.orchestrator.pairs())


def test_answers_equal_transformers(layout: Any, even: Oracle, wanted: dict[str, Golden]) -> None:
    before = handed(layout)
    for name, output in zip(NAMES, answer(layout, even, NAMES), strict=True):
        check(output, wanted[name])
    assert handed(layout) - before == len(NAMES)
    assert layout._omni.orchestrator.held() == 0


@pytest.mark.parametrize("stage", [PREFILL, DECODE])
def test_answers_stay_the_same_when_a_rank_dies(
    stage: str, layout: Any, even: Oracle, wanted: dict[str, Golden]
) -> None:
    """The replica's other processes end, and it restarts."""
    replica, names = ReplicaId(stage, 0), [*EIGHT, *NAMES] * 2
    processes, pools = layout._deployment.processes, layout._omni.orchestrator.pools
    engine = psutil.Process(processes()[replica].pid)
    of_the_replica = [engine, *engine.children(recursive=True)]
    with ThreadPoolExecutor(1) as thread:
        answers = thread.submit(answer, layout, even, names)
        assert until(lambda: pools[stage].in_flight(replica) > 0, SETTLED_S)
        os.kill(of_the_replica[-1].pid, signal.SIGKILL)
        outputs = answers.result()
    for name, output in zip(names, outputs, strict=True):
        check(output, wanted[name])
    assert layout._omni.orchestrator.held() == 0
    assert until(lambda: back(layout) and processes()[replica].pid != engine.pid, BACK_S)
    assert until(lambda: not any(process.is_running() for process in of_the_replica), SETTLED_S)
    before = handed(layout)
    check(answer(layout, even, ["text"])[0], wanted["text"])
    assert handed(layout) == before + 1
