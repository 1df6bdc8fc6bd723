"""The sizes from which a plan is made are those of the models."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen3OmniMoeConfig, Qwen3OmniMoeForConditionalGeneration

from vllm_omni_ext.model_plugins.qwen3_omni.facts import (
    ENCODER_PIECES,
    FRAMES_IN_FLIGHT,
    LARGEST_IMAGE_PIXELS,
    RECORDED_FRAMES,
    facts,
)
from vllm_omni_ext.model_plugins.qwen3_omni.tiny.config import REAL_VOCAB, RELEASED, SMALL, Sizes, model_config
from vllm_omni_ext.model_plugins.qwen3_omni.tiny.vocabulary import real_vocabulary, small_vocabulary
from vllm_omni_ext.model_plugins.qwen3_omni.vocoder import DEFAULT_MAX_FRAMES_PER_PASS, Vocoder
from vllm_omni_ext.model_plugins.qwen3_omni.vocoder_graphs import MOST_FRAMES
from vllm_omni_ext.plugins.memory import StageFacts, StoredTensors, WeightPart

RELEASED_PARAMETERS = 35_259_818_545
"""Of Qwen3-Omni-30B-A3B-Instruct, 70.5 GB in bfloat16."""


def config_of(sizes: Sizes) -> Qwen3OmniMoeConfig:
    words = small_vocabulary() if sizes is SMALL else real_vocabulary()
    return Qwen3OmniMoeConfig(**model_config(sizes, words))


def facts_of(config: Any, stored: StoredTensors | None = None) -> dict[str, StageFacts]:
    return facts(config, {"talker": {"max_tokens": 4096}}, stored)


def quantizable(found: StageFacts) -> WeightPart:
    """The only part of a stage that is quantizable."""
    [part] = [part for part in found.weights if part.quantizable]
    return part


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [SMALL, REAL_VOCAB, RELEASED], ids=lambda sizes: sizes.name)
def test_the_stages_have_all_weights_of_the_model(sizes: Sizes) -> None:
    config = config_of(sizes)
    found = facts_of(config)
    thinker, talker = config.thinker_config.text_config, config.talker_config.text_config
    table = found["talker"].weights[-1]
    assert (table.elements, table.split) == (thinker.vocab_size * talker.hidden_size, False)
    total = sum(part.elements for stage in found.values() for part in stage.weights) - table.elements
    with torch.device("meta"):
        model = Qwen3OmniMoeForConditionalGeneration(config)
    assert total == sum(parameter.numel() for parameter in model.parameters())
    assert total == RELEASED_PARAMETERS or sizes is not RELEASED


@pytest.mark.parametrize("stage", ["thinker", "talker"])
def test_weights_of_experts_and_attention_can_be_quantized(stage: str) -> None:
    """Norms and routers stay in 16 bits, and every device of a replica holds them."""
    config = config_of(RELEASED)
    text = getattr(config, f"{stage}_config").text_config
    hidden, layers, dim = text.hidden_size, text.num_hidden_layers, text.head_dim
    shared = text.shared_expert_intermediate_size if stage == "talker" else 0
    experts = 3 * hidden * (text.num_experts * text.moe_intermediate_size + shared)
    attention = hidden * dim * 2 * (text.num_attention_heads + text.num_key_value_heads)
    found = facts_of(config)[stage]
    assert quantizable(found).elements == layers * (experts + attention)
    whole = found.weights[-1 if stage == "thinker" else -2]
    routers = text.num_experts * hidden + (hidden if shared else 0)
    assert (whole.split, whole.elements) == (False, layers * (2 * hidden + 2 * dim + routers) + hidden)


@pytest.mark.parametrize("sizes", [SMALL, RELEASED], ids=lambda sizes: sizes.name)
def test_the_state_of_a_stream(sizes: Sizes) -> None:
    config = config_of(sizes)
    with torch.device("meta"):
        real = Vocoder(config.code2wav_config)._state_numel
    counted = facts_of(config)["code2wav"].sequence_elements
    assert counted >= real or sizes is SMALL
    assert counted <= 1.3 * real


def test_frames_in_the_making_are_counted() -> None:
    talker = facts_of(config_of(RELEASED))["talker"]
    assert 1.3e6 <= 2 * talker.sequence_elements < 1.4e6
    assert (FRAMES_IN_FLIGHT, RECORDED_FRAMES) == (DEFAULT_MAX_FRAMES_PER_PASS, MOST_FRAMES)


def stored(sizes: Sizes, expert: tuple[str, float]) -> StoredTensors:
    """A checkpoint in bfloat16 whose experts in the thinker are of this dtype and so many bytes an element."""
    with torch.device("meta"):
        model = Qwen3OmniMoeForConditionalGeneration(config_of(sizes))
    found: dict[str, tuple[str, int, int]] = {}
    for name, parameter in model.named_parameters():
        dtype, width = expert if name.startswith("thinker") and ".experts." in name else ("BF16", 2.0)
        count = parameter.numel() if dtype == "BF16" else math.ceil(parameter.numel() * width)
        found[name] = (dtype, count, math.ceil(parameter.numel() * width))
    return found


def test_stored_files_have_the_sizes_of_their_types() -> None:
    config = config_of(SMALL)
    plain, packed = facts_of(config), facts_of(config, stored(SMALL, ("U8", 0.5)))
    assert facts_of(config, stored(SMALL, ("BF16", 2.0))) == plain
    text = config.thinker_config.text_config
    experts = text.num_hidden_layers * text.num_experts * 3 * text.hidden_size * text.moe_intermediate_size
    part, whole = quantizable(packed["thinker"]), quantizable(plain["thinker"])
    assert (part.elements, part.stored_bytes) == (whole.elements - experts, experts // 2)
    assert [each for each in packed["thinker"].weights if each != part] == [
        each for each in plain["thinker"].weights if each != whole
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("said", "width"),
    [
        ({"quant_method": "awq", "bits": 4}, 0.5),
        ({"quant_method": "fp8"}, 1),
        (SimpleNamespace(quant_method="gptq", bits=8, to_dict=dict), 1),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 4}}}}, 0.5),
        ({"quant_method": "of tomorrow"}, 2),
        (None, 2),
    ],
)
def test_without_files_the_config_gives_the_width_of_quantized_weights(said: Any, width: float) -> None:
    config = config_of(SMALL)
    config.quantization_config = said
    found = facts_of(config)
    part, whole = quantizable(found["thinker"]), quantizable(facts_of(config_of(SMALL))["thinker"])
    assert part.elements * 2 + part.stored_bytes == pytest.approx(whole.elements * width, rel=0.06)
    assert part.elements == (whole.elements if width == 2 else 0)
    assert found["talker"] == facts_of(config_of(SMALL))["talker"]


def test_the_largest_picture_is_that_of_vllms_encoder_budget() -> None:
    encoder = facts_of(config_of(RELEASED))["thinker"].encoder
    assert encoder is not None
    assert (encoder.image_tokens, LARGEST_IMAGE_PIXELS) == (12544, 12544 * 32 * 32)


@pytest.mark.engine
@pytest.mark.extended
def test_the_encoder_holds_the_counted_bytes(tmp_path: Path) -> None:
    """By running vLLM's encoder on two pictures; the program describes attention and rotation on CUDA."""
    program = Path(__file__).parents[1] / "support" / "encoder_peak.py"
    command = [sys.executable, str(program), str(tmp_path / "group")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    small, large = map(int, done.stdout.split())
    encoder = facts_of(config_of(RELEASED))["thinker"].encoder
    assert encoder is not None
    counted = (encoder.token_bytes + encoder.split_token_bytes) / 4 / ENCODER_PIECES
    assert small == large == pytest.approx(counted, rel=0.01)
