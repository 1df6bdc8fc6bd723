"""Prefill and decode on replicas of their own, with the real transfer engine; `test_prefill_decode.py` runs it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.processes.conftest import MAX_LEN, STEP_TOKENS
from tests.processes.test_parity import CASES, SCHEDULES, answer, check
from tests.processes.test_replicas import answers, same, wait_under_way
from tests.support.cluster import until
from tests.support.oracle import Golden, Oracle
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.model_plugins.qwen3_omni.family import THINKER
from vllm_omni_ext.plugins.spec import StageSpec
from vllm_omni_ext.runtime.supervise import process_watcher

PREFILL, DECODE = "thinker.prefill", "thinker.decode"
SETTLED_S = 120.0
BACK_S = 300.0
"""For machines that other programs keep busy."""

PATIENT: Mapping[str, Any] = MappingProxyType({"transfer_timeout_s": 60.0})
"""Decode gives up no transfer because it had to wait for a core."""

BLOCK = 32
MEDIA = [name for name, case in CASES.items() if any(isinstance(m["content"], list) for m in case.messages)]
EIGHT = [name for name, case in CASES.items() if case.voice == "ethan"][:8]


@pytest.fixture(scope="session", autouse=True)
def environment() -> Iterator[None]:
    """Nothing is compiled: the first logprobs would take 10 s."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._dynamo.config, "disable", True)
        yield


def started(model: Path, transfers: Mapping[str, Any] = PATIENT, thinker: StageSpec = THINKER, **settings: Any) -> Any:
    """One replica of each side."""
    from vllm import LLM

    split = {"engine": {"block_size": BLOCK}, "prefill_decode": dict(transfers)}
    size = {"max_model_len": MAX_LEN, "max_num_batched_tokens": STEP_TOKENS}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_watcher, "RESTART_BACKOFF_S", 0.1)
        probe = "ProbeWorker2_5" if "qwen2_5" in thinker.engine["worker_cls"] else "ProbeWorker"
        patch.setitem(thinker.engine, "worker_cls", f"tests.support.kv_probe.{probe}")
        patch.setitem(thinker.engine, "scheduler_cls", "tests.support.kv_probe.probe_scheduler")
        return LLM(str(model), omni=True, stage_overrides={"thinker": split}, **size, **settings)


@pytest.fixture(scope="module")
def pair(tiny: Path) -> Iterator[Any]:
    with started(tiny) as omni:
        yield omni


def each(omni: Any, method: str, *targets: str) -> dict[str, Any]:
    """Results of a worker's method in every replica of the targets; without targets, of both sides."""
    replies = omni.collective_rpc(method, targets=list(targets) or ["thinker"])
    assert all(reply.error is None for reply in replies.values()), replies
    return {str(replica): reply.value[0] for replica, reply in replies.items()}


def moved(omni: Any) -> float:
    """Bytes of KV cache that prefill replicas have sent."""
    return sum(counters.get("bytes", 0) for counters in each(omni, "transfer_counters", PREFILL).values())


def nothing_is_kept(omni: Any) -> bool:
    """Whether all blocks are free on both sides, no scheduler has a request, and no hidden states are left."""
    return not any(
        kept for count in ("used_blocks", "held_requests", "hidden_states_held") for kept in each(omni, count).values()
    )


def test_answers_one_by_one_equal_transformers(pair: Any, oracle: Oracle, expected: dict[str, Golden]) -> None:
    before = moved(pair)
    for name in CASES:
        (output,) = answer(pair, oracle, [name])
        check(output, expected[name])
    assert moved(pair) > before
    assert pair._omni.orchestrator.held() == 0
    assert until(lambda: nothing_is_kept(pair), SETTLED_S)


def test_answers_of_eight_at_once_equal_transformers(pair: Any, oracle: Oracle, expected: dict[str, Golden]) -> None:
    before = each(pair, "transfer_counters", DECODE)[f"{DECODE}/0"].get("received", 0)
    for name, output in zip(EIGHT, answer(pair, oracle, EIGHT, SCHEDULES["one by one"]), strict=True):
        check(output, expected[name])
    received = each(pair, "transfer_counters", DECODE)[f"{DECODE}/0"]
    assert received["received"] - before == len(EIGHT) and not received.get("failed_receives")
    assert until(lambda: nothing_is_kept(pair), SETTLED_S)


def test_the_encoder_runs_on_prefill_only(pair: Any, oracle: Oracle, expected: dict[str, Golden]) -> None:
    """In all requests of this module so far: a medium that was there before is in the encoder's cache."""
    for name, output in zip(MEDIA, answer(pair, oracle, MEDIA), strict=True):
        check(output, expected[name])
    steps = each(pair, "encoder_steps")
    assert steps[f"{PREFILL}/0"] > 0 and steps[f"{DECODE}/0"] == 0


LENGTHS = (1, 2, 3, BLOCK, BLOCK + 1, STEP_TOKENS, STEP_TOKENS + 1, 2000)


@pytest.mark.extended
def test_answers_to_prompts_of_any_length_equal_those_of_one_engine(pair: Any, whole: Any) -> None:
    """Twice: the second time both sides have the prompts in their prefix caches."""
    rng = np.random.default_rng(5)
    prompts = [{"prompt_token_ids": rng.integers(5, 250, length).tolist()} for length in LENGTHS]
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    wanted, *got = (
        omni.generate(prompts, sampling, modalities=["text"], use_tqdm=False) for omni in (whole, pair, pair)
    )
    assert [[said(output) for output in outputs] for outputs in got] == [[said(output) for output in wanted]] * 2
    assert until(lambda: nothing_is_kept(pair), SETTLED_S)


QUESTION = [{"role": "user", "content": "Tell me about the blue cat in the moon"}]


@pytest.mark.extended
@pytest.mark.parametrize(
    "params",
    [
        {"n": 3, "temperature": 1.0, "seed": 5},
        {"logprobs": 2, "temperature": 0},
        {"prompt_logprobs": 1, "temperature": 0},
        {"temperature": 0, "skip_reading_prefix_cache": True},
        {"temperature": 0, "structured_outputs": StructuredOutputsParams(regex="(red|blue)+")},
        {"temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    ],
    ids=lambda params: "-".join(params),
)
def test_sampling_parameters_have_the_effect_they_have_in_one_engine(params: Any, pair: Any, whole: Any) -> None:
    sampling = {"thinker": SamplingParams(max_tokens=12, **params)}
    (got,), (wanted,) = (omni.chat(QUESTION, sampling, modalities=["text"], use_tqdm=False) for omni in (pair, whole))
    assert got.error is None and wanted.error is None
    assert said(got) == said(wanted)
    assert logprobs(got) == logprobs(wanted)
    assert until(lambda: nothing_is_kept(pair), SETTLED_S)


@pytest.fixture(scope="module")
def whole(tiny: Path) -> Iterator[Any]:
    """The same model, not split."""
    from vllm import LLM

    with LLM(str(tiny), omni=True, max_model_len=MAX_LEN, max_num_batched_tokens=STEP_TOKENS) as omni:
        yield omni


def said(output: Any) -> list[tuple[str, tuple[int, ...], str | None]]:
    return [(one.text, tuple(one.token_ids), one.finish_reason) for one in output.outputs]


def logprobs(output: Any) -> list[Any]:
    """The listed ids by position, for the answers and for the prompt."""
    listed = [[set(at) for at in one.logprobs or ()] for one in output.outputs]
    return [*listed, [at and set(at) for at in output.prompt_logprobs or ()]]


def test_aborted_requests_leave_nothing(pair: Any) -> None:
    """At any moment of a transfer."""
    omni = pair._omni
    prompts = [{"prompt_token_ids": [20 + i] * 900} for i in range(24)]

    async def abort(number: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
        stream = omni.generate(prompts[number], params, f"gone-{number}")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02 * (number + 1)):
                async for _ in stream:
                    pass
        await stream.aclose()

    async def all_of_them() -> None:
        await asyncio.gather(*map(abort, range(len(prompts))))

    asyncio.run_coroutine_threadsafe(all_of_them(), pair._loop).result(SETTLED_S)
    assert omni.orchestrator.held() == 0
    assert until(lambda: nothing_is_kept(pair), SETTLED_S)


def under_load(omni: Any, oracle: Oracle, expected: Mapping[str, Golden], victim: str) -> None:
    """Kill a replica while it has requests; every answer equals Transformers', and the replica restarts."""
    names, replica = [*EIGHT, *MEDIA], ReplicaId.parse(victim)
    processes, pools = omni._deployment.processes, omni._omni.orchestrator.pools
    killed = processes()[replica].pid
    with ThreadPoolExecutor(1) as thread:
        answers = thread.submit(answer, omni, oracle, names)
        assert until(lambda: pools[replica.stage].in_flight(replica) > 0, SETTLED_S)
        os.kill(killed, signal.SIGKILL)
        outputs = answers.result()
    for name, output in zip(names, outputs, strict=True):
        check(output, expected[name])
    assert omni._omni.orchestrator.held() == 0
    assert until(lambda: back(omni) and processes()[replica].pid != killed, BACK_S)
    assert until(lambda: nothing_is_kept(omni), SETTLED_S)


@pytest.mark.extended
def test_seeded_answers_stay_the_same_when_the_decode_replica_dies(pair: Any) -> None:
    undisturbed = answers(pair)
    with ThreadPoolExecutor(1) as thread:
        got = thread.submit(answers, pair)
        victim = wait_under_way(pair, "thinker")
        assert victim.stage == DECODE
        os.kill(pair._deployment.processes()[victim].pid, signal.SIGKILL)
        assert same(got.result(), undisturbed)
    assert all(error is None for error, *_ in undisturbed)
    assert until(lambda: back(pair) and nothing_is_kept(pair), BACK_S)


def back(omni: Any) -> bool:
    """Whether every planned replica is up."""
    return all(len(omni._omni.orchestrator.pools[s.name].replicas) == len(s.replicas) for s in omni.plan.stages)


def test_answers_stay_the_same_when_the_prefill_replica_dies(
    pair: Any, oracle: Oracle, expected: dict[str, Golden]
) -> None:
    """Decode computes the prompts until the replica has restarted."""
    under_load(pair, oracle, expected, f"{PREFILL}/0")
    before = moved(pair)
    check(answer(pair, oracle, ["text"])[0], expected["text"])
    assert moved(pair) > before


def test_answers_stay_the_same_when_the_decode_replica_dies(
    pair: Any, oracle: Oracle, expected: dict[str, Golden]
) -> None:
    """Requests wait until it has restarted; blocks for the killed process are freed."""
    under_load(pair, oracle, expected, f"{DECODE}/0")
