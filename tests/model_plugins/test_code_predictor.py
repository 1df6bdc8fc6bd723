"""The code predictor against Transformers' own, and how residual codes are drawn."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeTalkerCodePredictorConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration as Reference,
)

from tests.support.examples import examples
from vllm_omni_ext.model_plugins.qwen3_omni.code_predictor import TOP_P, Choice, CodePredictor, Draw, draw_noise

HIDDEN = 32
GREEDY = Draw(greedy=True)
SHAPES: dict[str, dict[str, Any]] = {
    "grouped heads": {},
    "one head each": {"num_key_value_heads": 4, "num_hidden_layers": 1},
    "bias": {"attention_bias": True, "head_dim": 48},
    "two groups": {"num_code_groups": 2},
    "many groups": {"num_code_groups": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
}


@cache
def reference(shape: str) -> Reference:
    values: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_code_groups": 5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }
    config = Qwen3OmniMoeTalkerCodePredictorConfig(**(values | SHAPES[shape]))
    model = Reference._from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            scale = 0.3 if weight.dim() == 2 else 0.1
            weight.copy_(torch.randn(weight.shape, generator=generator) * scale + ("norm" in name))
    return model


@cache
def predictor(shape: str) -> CodePredictor:
    model = CodePredictor(reference(shape).config)
    model.load_state_dict(reference(shape).state_dict())  # strict: the names are the checkpoint's
    return model


def inputs(batch: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, HIDDEN, generator=generator), torch.randn(batch, HIDDEN, generator=generator)


def expected(shape: str, hidden: Tensor, first: Tensor) -> Tensor:
    model = reference(shape)
    with torch.no_grad():
        return model.generate(
            inputs_embeds=torch.stack((hidden, first), dim=1),
            max_new_tokens=model.config.num_code_groups - 1,
            do_sample=False,
        )


@pytest.mark.parametrize("batch", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_codes_are_those_of_transformers(shape: str, batch: int) -> None:
    hidden, first = inputs(batch, seed=batch)
    codes = predict(predictor(shape), hidden, first, [GREEDY] * batch)
    assert codes.dtype == torch.int64
    assert codes.tolist() == expected(shape, hidden, first).tolist()


def choice(draws: list[Draw], steps: int) -> Choice:
    greedy = [draw.greedy for draw in draws]
    if all(greedy):
        return Choice(None, None, None)
    noise = torch.zeros(len(draws), steps)
    draw_noise(draws, noise)
    nucleus = noise.new_full((len(draws), 1), TOP_P)
    return Choice(noise, torch.tensor(greedy) if any(greedy) else None, nucleus)


def choose(logits: Tensor, draws: list[Draw]) -> Tensor:
    return choice(draws, 1).choose(logits, 0)


@torch.inference_mode()
def predict(model: CodePredictor, hidden: Tensor, first: Tensor, draws: list[Draw]) -> Tensor:
    """Residual codes [batch, num_code_groups - 1] of one frame a row."""
    chosen = choice(draws, model.groups - 1)
    return torch.stack(model.loop.run(hidden, first, chosen.choose), dim=1)


def draw(seed: int) -> Draw:
    return Draw(greedy=False, generator=torch.Generator().manual_seed(seed))


def test_seeded_frames_do_not_depend_on_their_batch() -> None:
    hidden, first = inputs(4, seed=7)
    model = predictor("grouped heads")
    alone = [predict(model, hidden[i : i + 1], first[i : i + 1], [draw(i)])[0].tolist() for i in range(4)]
    assert predict(model, hidden, first, [draw(i) for i in range(4)]).tolist() == alone
    order = [2, 0, 3, 1]
    mixed = predict(model, hidden[order], first[order], [GREEDY if i == 3 else draw(i) for i in order]).tolist()
    alone[3] = expected("grouped heads", hidden, first)[3].tolist()
    assert mixed == [alone[i] for i in order]


def warped(row: Tensor) -> Tensor:
    """Transformers' own top-k and top-p filters: the probabilities it samples from."""
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    return TopPLogitsWarper(0.8)(None, TopKLogitsWarper(50)(None, row[None]))[0].softmax(-1)


@settings(max_examples=examples(25), deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([3, 50, 51, 200]), st.floats(0.05, 5))
def test_only_codes_that_transformers_would_sample_are_drawn(seed: int, codes: int, spread: float) -> None:
    row = torch.randn(codes, generator=torch.Generator().manual_seed(seed)) * spread
    allowed = set(warped(row).nonzero().flatten().tolist())
    generator = torch.Generator().manual_seed(seed)
    drawn = set(choose(row.expand(60, -1), [Draw(greedy=False, generator=generator)] * 60).tolist())
    assert drawn <= allowed
    assert len(allowed) <= 50


def test_codes_are_drawn_as_often_as_transformers_would() -> None:
    row = torch.randn(80, generator=torch.Generator().manual_seed(2)) * 1.5
    count, generator = 4000, torch.Generator().manual_seed(0)
    drawn = choose(row.expand(count, -1), [Draw(greedy=False, generator=generator)] * count)
    share = torch.bincount(drawn, minlength=80) / count
    assert (share - warped(row)).abs().max() < 0.03
    assert set(drawn.tolist()) == set(warped(row).nonzero().flatten().tolist())


@given(st.integers(0, 10**6), st.lists(st.booleans(), min_size=1, max_size=5))
def test_a_seeded_choice_does_not_depend_on_other_rows(seed: int, greedy: list[bool]) -> None:
    """The same logits and seed give the same code in any batch; a greedy row gives the maximum."""
    logits = torch.randn(len(greedy), 70, generator=torch.Generator().manual_seed(seed))
    draws = [GREEDY if g else draw(seed + i) for i, g in enumerate(greedy)]
    together = choose(logits, draws).tolist()
    for i, g in enumerate(greedy):
        alone = choose(logits[i : i + 1], [GREEDY if g else draw(seed + i)]).item()
        assert together[i] == alone
        if g:
            assert alone == logits[i].argmax()


def test_a_prediction_leaves_the_weights_as_they_were_loaded() -> None:
    model, loaded = predictor("bias"), reference("bias").state_dict()
    predict(model, *inputs(2, seed=1), [GREEDY] * 2)
    assert all(torch.equal(model.state_dict()[name], weight) for name, weight in loaded.items())


def test_batches_of_changing_size_share_their_memory() -> None:
    model, (hidden, first) = predictor("grouped heads"), inputs(40, seed=9)
    wanted = expected("grouped heads", hidden, first).tolist()
    for batch in (3, 40, 17, 3, 40, 1):
        codes = predict(model, hidden[:batch], first[:batch], [GREEDY] * batch)
        assert codes.tolist() == wanted[:batch]
    loop = model.loop
    assert loop._store.rows == 64
    assert {memory.stream.data_ptr() for memory in loop._memory.values()} == {loop._store.stream.data_ptr()}
