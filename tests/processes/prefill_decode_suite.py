"""Prefill and decode on replicas of their own, with the real transfer engine; `test_prefill_decode.py` runs it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
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
from tests.support import kv_probe
from tests.support.cluster import until
from tests.support.oracle import Golden, Oracle, one_thread
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.model_plugins.qwen3_omni.family import THINKER

PREFILL, DECODE = "thinker.prefill", "thinker.decode"
SETTLED_S = 120.0
BACK_S = 300.0
"""For machines that other programs keep busy; nobody waits longer than needed."""

PATIENT: Mapping[str, Any] = MappingProxyType({"transfer_timeout_s": 60.0})
"""Nor does decode give up a transfer only because it had to wait for a core."""

BLOCK = 32
MEDIA = [name for name, case in CASES.items() if any(isinstance(m["content"], list) for m in case.messages)]
EIGHT = [name for name, case in CASES.items() if case.voice == "ethan"][:8]


@pytest.fixture(scope="session", autouse=True)
def environment() -> Iterator[None]:
    """Functions may be sent to workers, to look into them. Nothing is compiled: the first logprobs would take 10 s."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
        patch.setattr(torch._dynamo.config, "disable", True)
        yield


def started(model: Path, prefills: int, decodes: int, transfers: Mapping[str, Any] = PATIENT) -> Any:
    """Replicas of both sides; `transfers` is what is set of the way between them."""
    from vllm import LLM

    split = {
        "engine": {"block_size": BLOCK},
        "prefill_decode": {"prefill": {"replicas": prefills}, "decode": {"replicas": decodes}, **transfers},
    }
    size = {"max_model_len": MAX_LEN, "max_num_batched_tokens": STEP_TOKENS}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(THINKER.engine, "scheduler_cls", "tests.support.kv_probe.probe_scheduler")
        return LLM(str(model), omni=True, stage_overrides={"thinker": split}, restart_backoff_s=0.1, **size)


@pytest.fixture(scope="module")
def pair(tiny: Path) -> Iterator[Any]:
    """One replica of each side, whose encoder is counted."""
    with started(tiny, 1, 1) as omni:
        omni.collective_rpc(count_encoder, targets=["thinker"])
        yield omni


# -- what the workers are asked ---------------------------------------------------------------------------------------


def count_encoder(worker: Any) -> None:
    """Count the steps in which the encoder runs."""
    step = worker.execute_model
    worker.encoded = 0

    def counted(scheduled: Any) -> Any:
        worker.encoded += bool(scheduled.scheduled_encoder_inputs)
        return step(scheduled)

    worker.execute_model = counted


def encoder_steps(worker: Any) -> int:
    return worker.encoded


def used_blocks(worker: Any) -> int:
    """Blocks that are not free, without vLLM's own null block."""
    pool = kv_probe._schedulers[0].kv_cache_manager.block_pool
    return pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()


def held_requests(worker: Any) -> int:
    return len(kv_probe._schedulers[0].requests)


def each(omni: Any, ask: str | Callable[..., Any], *targets: str) -> dict[str, Any]:
    """What every replica of the targets (of both sides without any) answers."""
    replies = omni.collective_rpc(ask, targets=list(targets) or ["thinker"])
    assert all(reply.error is None for reply in replies.values()), replies
    return {str(replica): reply.value[0] for replica, reply in replies.items()}


def moved(omni: Any) -> float:
    """Bytes of KV cache that prefill replicas have sent."""
    return sum(counters.get("bytes", 0) for counters in each(omni, "transfer_counters", PREFILL).values())


def nothing_is_kept(omni: Any) -> bool:
    """Whether all blocks are free on both sides, no scheduler has a request, and no hidden states are left."""
    return not any(
        kept for ask in (used_blocks, held_requests, "hidden_states_held") for kept in each(omni, ask).values()
    )


# -- one of each ------------------------------------------------------------------------------------------------------


def test_one_by_one(pair: Any, oracle: Oracle, expected: dict[str, Golden]) -> None:
    before = moved(pair)
    for name in CASES:
        (output,) = answer(pair, oracle, [name])
        check(output, expected[name])
    assert moved(pair) > before
    assert pair._omni.orchestrator.held() == 0
    assert until(lambda: nothing_is_kept(pair), SETTLED_S)


@pytest.mark.parametrize("schedule", ["one by one", "off"])
def test_eight_at_once(pair: Any, oracle: Oracle, expected: dict[str, Golden], schedule: str) -> None:
    before = each(pair, "transfer_counters", DECODE)[f"{DECODE}/0"].get("received", 0)
    for name, output in zip(EIGHT, answer(pair, oracle, EIGHT, SCHEDULES[schedule]), strict=True):
        check(output, expected[name])
    received = each(pair, "transfer_counters", DECODE)[f"{DECODE}/0"]
    assert received["received"] - before == len(EIGHT) and not received.get("failed_receives")
    assert until(lambda: nothing_is_kept(pair), SETTLED_S)


def test_the_encoder_runs_on_prefill_only(pair: Any, oracle: Oracle, expected: dict[str, Golden]) -> None:
    """Whatever has been asked so far; what it made once is in the encoder's cache."""
    for name, output in zip(MEDIA, answer(pair, oracle, MEDIA), strict=True):
        check(output, expected[name])
    steps = each(pair, encoder_steps)
    assert steps[f"{PREFILL}/0"] > 0 and steps[f"{DECODE}/0"] == 0


LENGTHS = (1, 2, 3, BLOCK, BLOCK + 1, STEP_TOKENS - 1, STEP_TOKENS, STEP_TOKENS + 1, 1000, 2000)
NEW = 8


def test_prompts_of_any_length(pair: Any, oracle: Oracle) -> None:
    """Twice: the second time both sides have them in their prefix caches."""
    rng = np.random.default_rng(5)
    prompts = [rng.integers(5, 250, length).tolist() for length in LENGTHS]
    sampling = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    with torch.no_grad(), one_thread():
        wanted = [greedy(oracle, prompt) for prompt in prompts]
    for _ in range(2):
        outputs = pair.generate(
            [{"prompt_token_ids": p} for p in prompts], sampling, modalities=["text"], use_tqdm=False
        )
        assert [list(output.outputs[0].token_ids) for output in outputs] == wanted
    assert until(lambda: nothing_is_kept(pair), SETTLED_S)


def greedy(oracle: Oracle, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
    made = oracle.model.thinker.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
    return made[0, len(prompt) :].tolist()


QUESTION = [{"role": "user", "content": "Tell me about the blue cat in the moon"}]


@pytest.mark.parametrize(
    "params",
    [
        {"n": 3, "temperature": 1.0, "seed": 5},
        {"logprobs": 2, "temperature": 0},
        {"prompt_logprobs": 1, "temperature": 0},
        {"temperature": 0, "skip_reading_prefix_cache": True},
        {"temperature": 0, "structured_outputs": StructuredOutputsParams(regex="(red|blue)+")},
        {"temperature": 0, "stop": ["e"], "min_tokens": 3},
        {"temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    ],
    ids=lambda params: "-".join(params),
)
def test_what_a_request_may_ask_for(params: Mapping[str, Any], pair: Any, whole: Any) -> None:
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
    """Which ids are listed where, for the answers and for the prompt."""
    listed = [[set(at) for at in one.logprobs or ()] for one in output.outputs]
    return [*listed, [at and set(at) for at in output.prompt_logprobs or ()]]


def test_requests_that_are_given_up_leave_nothing(pair: Any) -> None:
    """At any moment of a prompt's way from one side to the other."""
    import asyncio

    omni = pair._omni
    prompts = [{"prompt_token_ids": [20 + i] * 900} for i in range(24)]

    async def leave(number: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
        stream = omni.generate(prompts[number], params, f"gone-{number}")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02 * (number + 1)):
                async for _ in stream:
                    pass
        await stream.aclose()

    async def all_of_them() -> None:
        await asyncio.gather(*map(leave, range(len(prompts))))

    asyncio.run_coroutine_threadsafe(all_of_them(), pair._loop).result(SETTLED_S)
    assert omni.orchestrator.held() == 0
    assert until(lambda: nothing_is_kept(pair), SETTLED_S)


# -- whoever dies -----------------------------------------------------------------------------------------------------


def process(omni: Any, replica: ReplicaId) -> int:
    return omni._deployment.processes()[replica].pid


def under_load(omni: Any, oracle: Oracle, expected: Mapping[str, Golden], victim: str) -> None:
    """Kill a replica while it has requests; every answer is the undisturbed one, and the replica comes back."""
    names = [*EIGHT, *MEDIA] * 2
    replica = ReplicaId.parse(victim)
    killed = process(omni, replica)
    with ThreadPoolExecutor(1) as thread:
        answers = thread.submit(answer, omni, oracle, names)
        pool = omni._omni.orchestrator.pools[replica.stage]
        assert until(lambda: pool.in_flight(replica) > 0, SETTLED_S)
        os.kill(killed, signal.SIGKILL)
        outputs = answers.result()
    for name, output in zip(names, outputs, strict=True):
        check(output, expected[name])
    assert omni._omni.orchestrator.held() == 0
    assert until(lambda: back(omni) and process(omni, replica) != killed, BACK_S)
    assert until(lambda: nothing_is_kept(omni), SETTLED_S)


def back(omni: Any) -> bool:
    """Whether every planned replica takes requests again."""
    return all(len(omni._omni.orchestrator.pools[s.name].replicas) == len(s.replicas) for s in omni.plan.stages)


def test_the_only_prefill_replica_dies(pair: Any, oracle: Oracle, expected: dict[str, Golden]) -> None:
    """Decode computes the prompts until it is back."""
    under_load(pair, oracle, expected, f"{PREFILL}/0")
    before = moved(pair)
    check(answer(pair, oracle, ["text"])[0], expected["text"])
    assert moved(pair) > before


def test_the_only_decode_replica_dies(pair: Any, oracle: Oracle, expected: dict[str, Golden]) -> None:
    """Requests wait for it; what prefill had made for the one before is not kept."""
    under_load(pair, oracle, expected, f"{DECODE}/0")


def test_two_that_prefill(tiny: Path, oracle: Oracle, expected: dict[str, Golden]) -> None:
    with started(tiny, 2, 1) as omni:
        for name, output in zip(CASES, answer(omni, oracle, list(CASES)), strict=True):
            check(output, expected[name])
        assert all(counters["bytes"] > 0 for counters in each(omni, "transfer_counters", PREFILL).values())
        assert [str(pair.source) for pair in omni._omni.orchestrator.pairs()] == [f"{PREFILL}/0", f"{PREFILL}/1"]
        under_load(omni, oracle, expected, f"{PREFILL}/0")


def test_two_that_decode(tiny: Path, oracle: Oracle, expected: dict[str, Golden]) -> None:
    with started(tiny, 1, 2) as omni:
        for name, output in zip(CASES, answer(omni, oracle, list(CASES)), strict=True):
            check(output, expected[name])
        assert all(counters["received"] > 0 for counters in each(omni, "transfer_counters", DECODE).values())
        under_load(omni, oracle, expected, f"{DECODE}/1")
