"""The code2wav model class without an engine: loading, and what its pooler makes of the runner's metadata."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from vllm.pooling_params import PoolingParams
from vllm.v1.pool.metadata import PoolingMetadata, PoolingStates

from tests.support.vocoder_reference import (
    check_equal,
    expected,
    header,
    random_codes,
    reference,
    refusal,
    small_config,
)
from vllm_omni_ext.model_plugins.qwen3_omni import code2wav
from vllm_omni_ext.model_plugins.qwen3_omni.code2wav import POOLING_TASK, Qwen3OmniCode2Wav
from vllm_omni_ext.wire.stage_input import FILLER, PartHeader

REFERENCE = reference(small_config(), seed=1)
CHECKPOINT = {f"code2wav.{name}": tensor for name, tensor in REFERENCE.state_dict().items()}
OTHERS = {"thinker.model.norm.weight": torch.zeros(3), "talker.model.norm.weight": torch.zeros(3)}


def empty_model() -> Qwen3OmniCode2Wav:
    model_config = SimpleNamespace(hf_config=small_config())
    scheduler_config = SimpleNamespace(max_num_seqs=4)
    return Qwen3OmniCode2Wav(
        vllm_config=SimpleNamespace(model_config=model_config, scheduler_config=scheduler_config, additional_config={})
    )


@pytest.fixture(scope="module")
def model() -> Qwen3OmniCode2Wav:
    model = empty_model()
    model.load_weights((CHECKPOINT | OTHERS).items())
    return model


def metadata(prompts: list[list[int]], params: list[PoolingParams]) -> PoolingMetadata:
    """What the runner hands to the pooler for a step that holds these whole prompts."""
    lengths = [len(p) for p in prompts]
    ids = torch.zeros(len(prompts), max(lengths), dtype=torch.int32)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    for p in params:
        p.requires_token_ids = True
    result = PoolingMetadata(
        prompt_lens=torch.tensor(lengths),
        prompt_token_ids=None,
        prompt_token_ids_cpu=ids,
        pooling_params=params,
        pooling_states=[PoolingStates() for _ in prompts],
    )
    result.build_pooling_cursor(np.array(lengths), torch.tensor(lengths), device=torch.device("cpu"))
    return result


def part(stream: str, number: int = 0, *, last: bool = True) -> PoolingParams:
    return with_header(header(stream, number, last))


def with_header(part: PartHeader) -> PoolingParams:
    return PoolingParams(task=POOLING_TASK, extra_kwargs=part.as_extra())


def pool(model: Qwen3OmniCode2Wav, prompts: list[list[int]], params: list[PoolingParams]) -> list[Tensor]:
    positions = torch.cat([torch.arange(len(p)) for p in prompts])
    hidden = model(torch.zeros_like(positions), positions)
    assert len(hidden) == len(positions)
    return model.pooler(hidden_states=hidden, pooling_metadata=metadata(prompts, params))


def test_loads_only_its_own_tensors() -> None:
    model = empty_model()
    loaded = model.load_weights((OTHERS | CHECKPOINT).items())
    assert loaded == {name for name, _ in model.named_parameters()}
    assert all(model.is_unused_checkpoint_weight(name) for name in OTHERS)
    assert not any(model.is_unused_checkpoint_weight(name) for name in CHECKPOINT)


def test_loading_names_what_is_missing_or_wrong() -> None:
    lacking = {k: v for k, v in CHECKPOINT.items() if k != "code2wav.decoder.0.conv.bias"}
    with pytest.raises(ValueError, match=r"lacks 1 tensors .*code2wav\.decoder\.0\.conv\.bias"):
        empty_model().load_weights(lacking.items())
    with pytest.raises(ValueError, match=r"code2wav\.novelty has no place"):
        empty_model().load_weights((CHECKPOINT | {"code2wav.novelty": torch.zeros(1)}).items())
    wrong = CHECKPOINT | {"code2wav.decoder.0.conv.bias": torch.zeros(7)}
    with pytest.raises(ValueError, match=r"decoder\.0\.conv\.bias has shape \(7,\); the configuration expects \(16,\)"):
        empty_model().load_weights(wrong.items())


def test_utterances_of_one_step(model: Qwen3OmniCode2Wav) -> None:
    codes = [random_codes(REFERENCE.config, frames, seed=frames) for frames in (20, 1, 33)]
    waves = pool(model, [c.flatten().tolist() for c in codes], [part(str(i)) for i, _ in enumerate(codes)])
    for wave, frames in zip(waves, codes, strict=True):
        check_equal(wave, expected(REFERENCE, frames))


def test_a_stream_over_several_steps(model: Qwen3OmniCode2Wav) -> None:
    codes = random_codes(REFERENCE.config, 12, seed=3)
    steps = [(codes[:1], False), (codes[1:5], False), (codes[5:12], False)]
    waves = []
    for number, (chunk, last) in enumerate(steps):
        waves += pool(model, [chunk.flatten().tolist()], [part("a", number, last=last)])
    waves += pool(model, [FILLER], [with_header(header("a", 3, last=True, empty=True))])
    assert len(waves[-1]) == 0 and waves[-1].dtype == torch.float32
    check_equal(torch.cat(waves), expected(REFERENCE, codes))
    assert len(model.pooler.streams) == 0


def test_a_stream_that_is_ended_is_forgotten(model: Qwen3OmniCode2Wav, caplog: pytest.LogCaptureFixture) -> None:
    codes = random_codes(REFERENCE.config, 2, seed=3).flatten().tolist()
    pool(model, [codes], [part("a", last=False)])
    assert len(model.pooler.streams) == 1
    (answer,) = pool(model, [FILLER], [with_header(PartHeader.end("a"))])
    assert len(model.pooler.streams) == 0
    assert len(answer) == 0 and refusal(answer) is None
    (answer,) = pool(model, [codes], [part("a", 1)])
    assert refusal(answer) == "part 1 came for a stream that is not open"


@pytest.mark.parametrize(
    ("prompt", "params", "reason"),
    [
        ([1, 2, 3, 4, 5], header("bad", 0, last=True).as_extra(), "5 codes are no whole number of frames of 4"),
        ([1, 2, 3, 32], header("bad", 0, last=True).as_extra(), "codes reach from 1 to 32, allowed are 0 to 31"),
        ([1, 2, 3, 4], header("bad", 1, last=True).as_extra(), "part 1 came for a stream that is not open"),
        ([1, 2, 3, 4], {"last": True}, "extra_kwargs: Object missing required field `stream`"),
    ],
)
def test_one_bad_request_does_not_disturb_the_others(
    model: Qwen3OmniCode2Wav,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    prompt: list[int],
    params: dict[str, Any],
    reason: str,
) -> None:
    good = random_codes(REFERENCE.config, 5, seed=0)
    bad = PoolingParams(task=POOLING_TASK, extra_kwargs=params)
    with caplog.at_level(logging.ERROR):
        waves = pool(model, [prompt, good.flatten().tolist()], [bad, part("good")])
    assert reason in (refusal(waves[0]) or "")
    check_equal(waves[1], expected(REFERENCE, good))
    assert reason in caplog.text


def test_dummy_batches_cost_one_short_pass(model: Qwen3OmniCode2Wav, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[tuple[int, ...]] = []
    vocoder = model.pooler.vocoder
    run = vocoder._run
    monkeypatch.setattr(vocoder, "_run", lambda c, carry: passes.append(tuple(c.shape)) or run(c, carry))
    dummy = PoolingParams(task=POOLING_TASK)
    waves = pool(model, [[0] * 65537, [7] * 3], [dummy, dummy])
    assert [len(w) for w in waves] == [0, 0]
    assert passes == [(1, code2wav.WARM_UP_FRAMES, 4)]


def test_tasks_of_both_runner_generations() -> None:
    from vllm.v1.worker.gpu.pool.pooling_runner import _SUPPORTED_TASKS

    pooler = empty_model().pooler
    assert pooler.get_supported_tasks() == {POOLING_TASK}
    assert pooler.get_supported_tasks() <= _SUPPORTED_TASKS
    assert pooler.get_pooling_updates(POOLING_TASK).requires_token_ids


def test_warming_up_leaves_nothing_behind() -> None:
    """The first part of a stream and one of a stream under way have been decoded; there are no graphs on a CPU."""
    model = empty_model()
    model.load_weights(CHECKPOINT.items())
    shapes: list[tuple[int, ...]] = []
    vocoder = model.pooler.vocoder
    run = vocoder._run
    vocoder._run = lambda codes, carry: shapes.append(tuple(codes.shape)) or run(codes, carry)
    model.warm_up()
    assert shapes == [(1, 1, 4), (1, 2, 4)]
    assert (len(model.pooler.streams), model.pooler.streams.frames) == (0, 0)
    assert vocoder._graphs is None
