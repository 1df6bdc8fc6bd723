"""The code2wav model class without an engine: loading, and its pooler."""

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
from vllm_omni_ext.model_plugins.qwen3_omni.code2wav import Qwen3OmniCode2Wav
from vllm_omni_ext.model_plugins.qwen_omni.pooling import POOLING_TASK
from vllm_omni_ext.wire.stage_input import FILLER, PartHeader

REFERENCE = reference(small_config(), seed=1)
CHECKPOINT = {f"code2wav.{name}": tensor for name, tensor in REFERENCE.state_dict().items()}
BIAS = "code2wav.decoder.0.conv.bias"
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
    """The runner's metadata for a step that holds these whole prompts."""
    lengths = [len(p) for p in prompts]
    ids = torch.zeros(len(prompts), max(lengths), dtype=torch.int32)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    for p in params:
        p.requires_token_ids = True
    states = [PoolingStates() for _ in prompts]
    result = PoolingMetadata(torch.tensor(lengths), None, ids, params, states)
    result.build_pooling_cursor(np.array(lengths), torch.tensor(lengths), device=torch.device("cpu"))
    return result


def with_header(part: PartHeader) -> PoolingParams:
    return PoolingParams(task=POOLING_TASK, extra_kwargs=part.as_extra())


def part(stream: str, number: int = 0, *, last: bool = True) -> PoolingParams:
    return with_header(header(stream, number, last))


def pool(model: Qwen3OmniCode2Wav, prompts: list[list[int]], params: list[PoolingParams]) -> list[Tensor]:
    positions = torch.cat([torch.arange(len(p)) for p in prompts])
    hidden = model(torch.zeros_like(positions), positions)
    assert len(hidden) == len(positions)
    return model.pooler(hidden_states=hidden, pooling_metadata=metadata(prompts, params))


def test_only_tensors_of_code2wav_are_loaded() -> None:
    model = empty_model()
    assert model.load_weights((OTHERS | CHECKPOINT).items()) == {name for name, _ in model.named_parameters()}
    assert all(model.is_unused_checkpoint_weight(name) for name in OTHERS)
    assert not any(model.is_unused_checkpoint_weight(name) for name in CHECKPOINT)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({BIAS: None}, r"lacks 1 tensors .*code2wav\.decoder\.0\.conv\.bias"),
        ({"code2wav.novelty": torch.zeros(1)}, r"code2wav\.novelty has no place"),
        ({BIAS: torch.zeros(7)}, r"decoder\.0\.conv\.bias has shape \(7,\); the configuration expects \(16,\)"),
    ],
    ids=["missing", "unknown", "shape"],
)
def test_a_wrong_tensor_of_the_checkpoint_is_named(change: dict[str, Tensor | None], reason: str) -> None:
    tensors = {name: tensor for name, tensor in (CHECKPOINT | change).items() if tensor is not None}
    with pytest.raises(ValueError, match=reason):
        empty_model().load_weights(tensors.items())


def test_a_stream_over_several_steps_equals_transformers(model: Qwen3OmniCode2Wav) -> None:
    codes = random_codes(REFERENCE.config, 12, seed=3)
    steps = [(codes[:1], False), (codes[1:5], False), (codes[5:12], False)]
    waves = []
    for number, (chunk, last) in enumerate(steps):
        waves += pool(model, [chunk.flatten().tolist()], [part("a", number, last=last)])
    waves += pool(model, [FILLER], [with_header(header("a", 3, last=True, empty=True))])
    assert len(waves[-1]) == 0 and waves[-1].dtype == torch.float32
    check_equal(torch.cat(waves), expected(REFERENCE, codes))
    assert len(model.pooler.streams) == 0


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


def test_a_dummy_batch_runs_one_short_pass(model: Qwen3OmniCode2Wav, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[tuple[int, ...]] = []
    vocoder = model.pooler.vocoder
    run = vocoder._pass
    monkeypatch.setattr(vocoder, "_pass", lambda codes, *rest: passes.append(tuple(codes.shape)) or run(codes, *rest))
    dummy = PoolingParams(task=POOLING_TASK)
    assert [len(wave) for wave in pool(model, [[0] * 65537, [7] * 3], [dummy, dummy])] == [0, 0]
    assert passes == [(1, code2wav.WARM_UP_FRAMES, 4)]


def test_the_task_is_one_of_both_model_runners() -> None:
    from vllm.v1.worker.gpu.pool.pooling_runner import _SUPPORTED_TASKS

    pooler = empty_model().pooler
    assert pooler.get_supported_tasks() == {POOLING_TASK}
    assert pooler.get_supported_tasks() <= _SUPPORTED_TASKS
    assert pooler.get_pooling_updates(POOLING_TASK).requires_token_ids


def test_warming_up_leaves_no_stream_open() -> None:
    """The first part of a stream and one of a stream under way have been decoded; there are no graphs on a CPU."""
    model = empty_model()
    model.load_weights(CHECKPOINT.items())
    vocoder, shapes = model.pooler.vocoder, list[tuple[int, ...]]()
    run = vocoder._pass
    vocoder._pass = lambda codes, *rest: shapes.append(tuple(codes.shape)) or run(codes, *rest)
    model.warm_up()
    assert shapes == [(1, 1, 4), (1, 2, 4)]
    assert (len(model.pooler.streams), model.pooler.streams.frames) == (0, 0)
    assert vocoder._graphs is None
