"""The stage `ar` in a vLLM engine with the deployment's arguments: answers are those of the reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from tests.support.bagel_generate import step_text
from tests.support.bagel_runs import picture
from vllm_omni_ext.model_plugins.bagel.family import FAMILY
from vllm_omni_ext.model_plugins.bagel.model import Bagel
from vllm_omni_ext.model_plugins.bagel.prefill import Prefill
from vllm_omni_ext.model_plugins.bagel.prompts import Part, Prompts
from vllm_omni_ext.model_plugins.bagel.text import RunningText

pytestmark = pytest.mark.engine

CLOSE = 1e-4
TOKENS = 12
SMALL, LARGE, LONG = picture(48, 48, 1), picture(300, 200, 2), picture(40, 160, 3)
PROMPTS: dict[str, list[Part]] = {
    "picture": [LARGE, "What is it?"],
    "text": ["Tell me about the blue cat in the moon"],
    "picture in the middle": ["Look at this.", SMALL, "And now?"],
    "two pictures": [LONG, LARGE, "Which one is larger?"],
    "picture at the end": ["What is it?", SMALL],
}
ENGINES: dict[str, dict[str, Any]] = {"whole prompts": {}, "chunks": {"max_num_batched_tokens": 64, "block_size": 32}}
"""The second one computes no prompt of two pictures in one step, and its prefix cache has parts of pictures."""


def engine(checkpoint: Path, **given: Any) -> Any:
    """An engine with the arguments that a replica of `ar` gets, and vLLM's worker."""
    from vllm import LLM, EngineArgs, ModelRegistry

    from vllm_omni_ext.cli.settings import from_kwargs
    from vllm_omni_ext.ids import ReplicaId
    from vllm_omni_ext.runtime.launch.engine_args import stage_engine_args

    for architecture, target in FAMILY.pipeline().stage("ar").models.items():
        ModelRegistry.register_model(architecture, target)
    args = stage_engine_args(from_kwargs(str(checkpoint), **given), ReplicaId("ar", 0))
    args.worker_cls = "auto"  # StageWorker's process groups are one group, which vLLM's shutdown destroys once for each
    names = {field.name for field in dataclasses.fields(EngineArgs) if field.init}
    return LLM(**{name: value for name, value in vars(args).items() if name in names})


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    """An engine in this process, without pinning."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        yield


@pytest.fixture(scope="module", params=ENGINES)
def llm(checkpoint: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    made = engine(checkpoint, max_model_len=512, **ENGINES[request.param])
    yield made
    made.llm_engine.engine_core.shutdown()


@dataclass(frozen=True)
class Reply:
    """Greedy tokens, of each the log probability, and how many tokens of the prompt were in the prefix cache."""

    ids: list[int]
    logprobs: list[float]
    cached: int = 0


def prompt_of(parts: Sequence[Part], model: Bagel) -> dict[str, Any]:
    """A prompt with the start of the reply."""
    pad = model.tokens._id("<|image_pad|>")
    ids = [id_ for part in parts for id_ in (model.tokens.text(part) if isinstance(part, str) else [pad])]
    pictures = [part for part in parts if isinstance(part, Image.Image)]
    prompt: dict[str, Any] = {"prompt_token_ids": [*ids, model.tokens.start]}
    return {**prompt, "multi_modal_data": {"image": pictures}} if pictures else prompt


def replies(llm: Any, prompts: Sequence[Mapping[str, Any]], tokens: int = TOKENS) -> list[Reply]:
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=tokens, logprobs=1, ignore_eos=True)
    found = []
    for output in llm.generate(list(prompts), greedy, use_tqdm=False):
        ids = list(output.outputs[0].token_ids)
        each = zip(output.outputs[0].logprobs, ids, strict=True)
        found.append(Reply(ids, [step[id_].logprob for step, id_ in each], output.num_cached_tokens))
    return found


def expected_reply(parts: Sequence[Part], model: Bagel, prompts: Prompts) -> Reply:
    """The reply of the model itself, which is that of the reference."""
    running = RunningText(model, Prefill(model, torch.Generator()).context(prompts.reply(parts)), TOKENS)
    logits = torch.cat([step_text(model, [running]) for _ in range(TOKENS)])
    ids = running.ids[1 : TOKENS + 1]
    return Reply(ids, logprobs_of(logits, ids))


def logprobs_of(logits: Tensor, ids: Sequence[int]) -> list[float]:
    return logits.float().log_softmax(-1)[range(len(ids)), list(ids)].tolist()


def assert_equal(found: Reply, expected: Reply) -> None:
    assert found.ids == expected.ids
    assert found.logprobs == pytest.approx(expected.logprobs, abs=CLOSE)


def test_prompts_in_one_batch_and_alone_equal_the_model(llm: Any, model: Bagel, prompts: Prompts) -> None:
    """The second time, parts of the prompts are in the prefix cache if its blocks are small."""
    small_blocks = llm.llm_engine.vllm_config.cache_config.block_size == 32
    given = [prompt_of(parts, model) for parts in PROMPTS.values()]
    together, cached = replies(llm, given), list[int]()
    for name, prompt, found in zip(PROMPTS, given, together, strict=True):
        expected = expected_reply(PROMPTS[name], model, prompts)
        assert_equal(found, expected)
        [alone] = replies(llm, [prompt])
        assert_equal(alone, expected)
        cached.append(alone.cached)
    assert any(cached) == small_blocks
