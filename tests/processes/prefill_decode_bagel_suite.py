"""BAGEL whose `ar` has prefill and decode replicas, with the real transfer engine; `test_prefill_decode.py` runs it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm import LLM, SamplingParams

from tests.processes.prefill_decode_suite import BACK_S, BLOCK, PATIENT, SETTLED_S, back, each
from tests.support.bagel_runs import golden
from tests.support.bagel_serving import REPLIES, alone, assert_same, expected_reply, messages
from tests.support.cluster import until
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.model_plugins.bagel.family import AR
from vllm_omni_ext.model_plugins.bagel.model import Bagel
from vllm_omni_ext.runtime.supervise import process_watcher

PREFILL, DECODE = "ar.prefill", "ar.decode"
PROMPT = "a red cat"
SMALL = {"num_timesteps": 5, "seed": 1, "max_think_token_n": 16}
AT_ONCE = 8


@pytest.fixture(scope="module")
def pair(bagel: Path) -> Iterator[Any]:
    """One replica of each side, and one of `dit`."""
    stages = {
        "ar": {"engine": {"block_size": BLOCK}, "prefill_decode": dict(PATIENT)},
        "dit": {"cpu_threads": 1},  # a fork of a process that has computed cannot start threads
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_watcher, "RESTART_BACKOFF_S", 0.1)
        patch.setitem(AR.engine, "worker_cls", "tests.support.kv_probe.StageProbe")
        patch.setitem(AR.engine, "scheduler_cls", "tests.support.kv_probe.picture_probe_scheduler")
        with LLM(str(bagel), omni=True, max_model_len=1024, stage_config="bagel_pd", stage_overrides=stages) as made:
            yield made


def received(omni: Any) -> float:
    """Prompts whose KV cache the decode replica has fetched; no transfer may have failed."""
    counters = each(omni, "transfer_counters", DECODE)[f"{DECODE}/0"]
    assert not counters.get("failed_receives")
    return counters.get("received", 0)


def nothing_is_kept(omni: Any) -> bool:
    """Whether all blocks are free on both sides, and no scheduler has a request."""
    return not any(kept for count in ("used_blocks", "held_requests") for kept in each(omni, count, "ar").values())


def replies(omni: Any, times: int) -> list[list[int]]:
    """The token ids of the replies to the reference's prompts, so often, at once."""
    greedy = SamplingParams(temperature=0, max_tokens=23)
    prompts = [messages(golden(name).parts) for name in REPLIES] * times
    outputs = omni.chat(prompts, greedy, modalities=["text"], use_tqdm=False)
    assert [output.error for output in outputs] == [None] * len(prompts)
    return [list(output.outputs[0].token_ids) for output in outputs]


EXPECTED = [expected_reply(name) for name in REPLIES]


def test_replies_to_a_text_and_a_picture_equal_the_reference(pair: Any) -> None:
    """Twice: the second time both sides have the prompts in their prefix caches. The encoder runs on prefill only."""
    before = received(pair)
    assert [replies(pair, 1), replies(pair, 1)] == [EXPECTED] * 2
    assert received(pair) > before
    steps = each(pair, "encoder_steps", "ar")
    assert steps[f"{PREFILL}/0"] > 0 and steps[f"{DECODE}/0"] == 0
    assert until(lambda: nothing_is_kept(pair), SETTLED_S)


def test_prefill_computes_the_prompt_of_a_thought_and_its_picture_equals_the_model(
    pair: Any, bagel_model: Bagel
) -> None:
    before = received(pair)
    expected, thought = alone(bagel_model, [PROMPT], height=32, width=48, think=True, **SMALL)
    [made] = pair.generate(PROMPT, modalities=["image"], think=True, size="48x32", use_tqdm=False, **SMALL)
    assert made.error is None and made.think_text == thought
    assert_same(np.asarray(made.images[0]), expected)
    assert received(pair) == before + 1
    assert pair._omni.orchestrator.held() == 0
    assert until(lambda: nothing_is_kept(pair), SETTLED_S)


@pytest.mark.parametrize("side", [PREFILL, DECODE])
def test_replies_and_thoughts_stay_the_same_when_a_replica_dies(pair: Any, side: str) -> None:
    replica, pool = ReplicaId(side, 0), pair._omni.orchestrator.pools[side]
    killed = pair._deployment.processes()[replica].pid
    thought = {"modalities": ["image"], "think": True, "size": "48x32", "use_tqdm": False, **SMALL}
    [undisturbed] = pair.generate(PROMPT, **thought)
    with ThreadPoolExecutor(2) as threads:
        texts = threads.submit(replies, pair, AT_ONCE)
        thoughts = threads.submit(pair.generate, [PROMPT] * AT_ONCE, **thought)
        assert until(lambda: pool.in_flight(replica) > 0, SETTLED_S)
        os.kill(killed, signal.SIGKILL)
        assert texts.result() == EXPECTED * AT_ONCE
        assert [made.think_text for made in thoughts.result()] == [undisturbed.think_text] * AT_ONCE
    assert until(lambda: back(pair) and pair._deployment.processes()[replica].pid != killed, BACK_S)
    assert until(lambda: nothing_is_kept(pair), SETTLED_S)
    assert replies(pair, 1) == EXPECTED
