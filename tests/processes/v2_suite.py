"""Engines with Model Runner V2, as on CUDA, on a CPU; `test_v2.py` runs it where Triton's kernels are interpreted."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from tests.processes import test_qwen2_5_omni as qwen2_5
from tests.processes.conftest import MAX_LEN, STEP_TOKENS
from tests.processes.test_parity import CASES, answer, check, golden, prompt, sampling, user
from tests.processes.test_replicas import same, wait_under_way
from tests.support import qwen2_5_oracle
from tests.support.oracle import Oracle
from vllm_omni_ext.model_plugins.qwen2_5_omni.tiny.qwen2_5_omni import write_qwen2_5_omni

SIZE = {"max_model_len": MAX_LEN, "max_num_batched_tokens": STEP_TOKENS}


@pytest.fixture(scope="session", autouse=True)
def environment() -> Iterator[None]:
    """Functions may be sent to workers, to look into them. Nothing is compiled: it would take longer than the tests."""
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
        patch.setattr(torch._dynamo.config, "disable", True)
        yield


def values(omni: Any, ask: Any, stage: str) -> list[Any]:
    """The answer of each worker process of a stage with one replica."""
    (reply,) = omni.collective_rpc(ask, targets=[stage]).values()
    assert reply.error is None
    return list(reply.value)


def runner_module(worker: Any) -> str:
    return type(worker.model_runner).__module__


# -- too little memory for all requests at once -----------------------------------------------------------------------

BLOCK = 32
LENGTHS = {"thinker": 256, "talker": 128}
"""Longest sequences; the caches hold one of them, and the block that vLLM keeps. All requests need much more."""

MANY = [replace(CASES[name], text=96, frames=80) for name in ("text", "long_answer")] * 4
"""Of the cases those with the longest answers, which grow while others need room to grow too."""


@pytest.fixture(scope="module")
def cramped(tiny: Path) -> Iterator[Any]:
    """Thinker and talker with a cache for a few requests."""
    from vllm import LLM

    few = {
        stage: {"num_gpu_blocks_override": length // BLOCK + 1, "block_size": BLOCK, "max_model_len": length}
        for stage, length in LENGTHS.items()
    }
    overrides = {stage: {"engine": engine} for stage, engine in few.items()}
    # Interpreted kernels are so slow that a preempted request waits for longer than the default.
    waits = {"chunk_timeout_s": 600.0}
    with LLM(str(tiny), omni=True, stage_overrides=overrides, max_num_batched_tokens=STEP_TOKENS, **waits) as omni:
        yield omni


def count_repeats(worker: Any) -> None:
    """Count the requests that begin again in a step, because they were preempted."""
    step, seen = worker.execute_model, set()
    worker.repeats = 0

    def counted(scheduled: Any) -> Any:
        resumed = scheduled.scheduled_cached_reqs.resumed_req_ids
        new = {each.req_id for each in scheduled.scheduled_new_reqs}
        worker.repeats += len(resumed | (new & seen))
        seen.update(new)
        return step(scheduled)

    worker.execute_model = counted


def repeats(worker: Any) -> int:
    return worker.repeats


def test_the_runner_is_the_one_of_cuda(cramped: Any) -> None:
    for stage in ("thinker", "talker", "code2wav"):
        assert values(cramped, runner_module, stage) == ["vllm.v1.worker.cpu.model_runner"]


def test_preempted_requests(cramped: Any, oracle: Oracle) -> None:
    for stage in LENGTHS:
        cramped.collective_rpc(count_repeats, targets=[stage])
    outputs = cramped.generate(
        [prompt(oracle, case) for case in MANY], [sampling(case) for case in MANY], voice="ethan", use_tqdm=False
    )
    wanted = [golden(oracle, case) for case in MANY[:2]] * 4
    for output, each in zip(outputs, wanted, strict=True):
        check(output, each)
    counts = {stage: values(cramped, repeats, stage)[0] for stage in LENGTHS}
    assert min(counts.values()) > 0, counts
    assert cramped._omni.orchestrator.held() == 0


SEEDED = {
    "thinker": SamplingParams(temperature=1, seed=3, max_tokens=16, ignore_eos=True),
    "talker": SamplingParams(temperature=0.9, top_k=0, seed=5, min_tokens=16, max_tokens=17),
}
"""Without `top_p` and `top_k`, whose kernel Triton's interpreter cannot run."""

BEGUN, BEGINS_WITHIN_S = 5, 300.0


@pytest.mark.parametrize("stage", ["thinker", "talker"])
def test_seeded_answers_stay_the_same_when_a_replica_dies(stage: str, cramped: Any) -> None:
    """The runner draws by seed and position: a replay goes on with the same random numbers."""

    def answers() -> list[Any]:
        made = cramped.chat([[user("Tell me a story.")], [user("hello world")]], [SEEDED] * 2, use_tqdm=False)
        return [(each.error, each.outputs[0].token_ids, each.frames.tolist(), each.audio) for each in made]

    undisturbed = answers()
    with ThreadPoolExecutor(1) as thread:
        got = thread.submit(answers)
        victim = wait_under_way(cramped, stage, BEGUN, BEGINS_WITHIN_S)
        os.kill(cramped._deployment.processes()[victim].pid, signal.SIGKILL)
        assert same(got.result(), undisturbed)
    assert all(error is None for error, *_ in undisturbed)


# -- engines of several processes -------------------------------------------------------------------------------------

RANKS = 2
PARALLEL = ("text", "audio", "image", "long_prompt")


@pytest.fixture(scope="module")
def parallel(divisible: Path) -> Iterator[Any]:
    """Thinker and talker as two processes each."""
    from vllm import LLM

    two = {"engine": {"tensor_parallel_size": RANKS}}
    with LLM(str(divisible), omni=True, stage_overrides={"thinker": two, "talker": two}, **SIZE) as omni:
        yield omni


def process(worker: Any) -> int:
    return os.getpid()


def open_hidden_states(worker: Any) -> Any:
    return worker.hidden_states_open()


def test_tensor_parallel(parallel: Any, divisible: Path) -> None:
    assert not list(Path("/dev/shm").glob("vllm_dist_*"))  # the ranks' shared memory has no names that would stay
    oracle = Oracle(divisible)
    for stage in ("thinker", "talker"):
        assert len(set(values(parallel, process, stage))) == RANKS
    wanted = {name: golden(oracle, CASES[name]) for name in PARALLEL}
    for name, output in zip(PARALLEL, answer(parallel, oracle, list(PARALLEL)), strict=True):
        check(output, wanted[name])
    for name in ("text", "audio"):
        (output,) = answer(parallel, oracle, [name])
        check(output, wanted[name])
    assert parallel._omni.orchestrator.held() == 0


def frames_of_ranks(worker: Any) -> list[Any]:
    """Note every frame this process makes."""
    provider, made = worker._model.input_provider, []
    sampled = provider.sampled

    def noted(*arguments: Any) -> Any:
        outputs = sampled(*arguments)
        made.extend(output.tolist() for output in outputs if output is not None)
        return outputs

    provider.sampled, worker.made = noted, made
    return made


def made_frames(worker: Any) -> list[Any]:
    return worker.made


def test_ranks_draw_the_same_codes(parallel: Any) -> None:
    """Each process has its own code predictor and reads its own frames: without a seed too, they must be the same.

    The kernel for top-k is not made for an interpreter.
    """
    values(parallel, frames_of_ranks, "talker")
    talker = SamplingParams(temperature=0.9, min_tokens=12, max_tokens=13)
    prompts = [{"prompt": f"<|im_start|>user\n{word}<|im_end|>\n<|im_start|>assistant\n"} for word in ("hello", "you")]
    outputs = parallel.generate(
        prompts, {"thinker": SamplingParams(temperature=0, max_tokens=6), "talker": talker}, use_tqdm=False
    )
    assert [output.error for output in outputs] == [None, None]
    one, other = values(parallel, made_frames, "talker")
    assert len(one) >= 24 and one == other


# -- Qwen2.5-Omni -----------------------------------------------------------------------------------------------------

SHORT = [replace(CASES[name], text=6, frames=12) for name in ("system", "audio", "image", "few_frames")]


def test_qwen2_5_omni(tmp_path: Path) -> None:
    """One after the other, and then at once."""
    from vllm import LLM

    checkpoint = write_qwen2_5_omni(tmp_path / "model")
    oracle = qwen2_5_oracle.Oracle(checkpoint)
    wanted = [qwen2_5.golden(oracle, case) for case in SHORT]
    with LLM(str(checkpoint), omni=True, **SIZE) as omni:
        for stage in ("thinker", "talker", "token2wav"):
            assert values(omni, runner_module, stage) == ["vllm.v1.worker.cpu.model_runner"]
        for case, each in zip(SHORT, wanted, strict=True):
            check(qwen2_5.answers(omni, oracle, [case])[0], each)
        for output, each in zip(qwen2_5.answers(omni, oracle, SHORT), wanted, strict=True):
            check(output, each)
        assert omni._omni.orchestrator.held() == 0
