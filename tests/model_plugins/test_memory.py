"""The sizes from which a plan is made are those of the models."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen3OmniMoeConfig, Qwen3OmniMoeForConditionalGeneration

from vllm_omni_ext.model_plugins.qwen3_omni import memory as module
from vllm_omni_ext.model_plugins.qwen3_omni.memory import (
    ENCODER_PIECES,
    FRAMES_IN_FLIGHT,
    RECORDED_FRAMES,
    memory,
    part_of,
)
from vllm_omni_ext.model_plugins.qwen3_omni.tiny.config import model_config
from vllm_omni_ext.model_plugins.qwen3_omni.tiny.sizes import REAL_VOCAB, RELEASED, SMALL, Sizes
from vllm_omni_ext.model_plugins.qwen3_omni.tiny.vocabulary import real_vocabulary, small_vocabulary
from vllm_omni_ext.model_plugins.qwen3_omni.vocoder import DEFAULT_MAX_FRAMES_PER_PASS, Vocoder
from vllm_omni_ext.model_plugins.qwen3_omni.vocoder_graphs import MOST_FRAMES
from vllm_omni_ext.plugins.memory import StageMemory, StoredTensors

RELEASED_PARAMETERS = 35_259_818_545
"""Of Qwen3-Omni-30B-A3B-Instruct, 70.5 GB in bfloat16."""


def config_of(sizes: Sizes) -> Qwen3OmniMoeConfig:
    words = small_vocabulary() if sizes is SMALL else real_vocabulary()
    return Qwen3OmniMoeConfig(**model_config(sizes, words))


def elements(found: dict[str, StageMemory]) -> dict[str, int]:
    return {part.name: part.elements for stage in found.values() for part in stage.weights}


@pytest.mark.parametrize("sizes", [SMALL, REAL_VOCAB, RELEASED], ids=lambda sizes: sizes.name)
def test_computed_sizes_are_those_of_the_model(sizes: Sizes) -> None:
    config = config_of(sizes)
    with torch.device("meta"):
        model = Qwen3OmniMoeForConditionalGeneration(config)
    real = Counter[str]()
    for name, parameter in model.named_parameters():
        real[part_of(name)] += parameter.numel()
    computed = elements(memory(config))
    text, talker = config.thinker_config.text_config, config.talker_config.text_config
    assert computed.pop("text table") == text.vocab_size * talker.hidden_size
    assert computed == real
    if sizes is RELEASED:
        assert sum(real.values()) == RELEASED_PARAMETERS


@pytest.mark.parametrize("sizes", [SMALL, RELEASED], ids=lambda sizes: sizes.name)
def test_the_state_of_a_stream(sizes: Sizes) -> None:
    config = config_of(sizes)
    with torch.device("meta"):
        real = Vocoder(config.code2wav_config)._state_numel
    counted = memory(config)["code2wav"].sequence_elements
    assert counted >= real or sizes is SMALL
    assert counted <= 1.3 * real


def test_frames_in_the_making_are_counted() -> None:
    talker = memory(config_of(RELEASED))["talker"]
    assert 1.3e6 <= 2 * talker.sequence_elements < 1.4e6
    assert (FRAMES_IN_FLIGHT, RECORDED_FRAMES) == (DEFAULT_MAX_FRAMES_PER_PASS, MOST_FRAMES)


def stored(sizes: Sizes, expert: tuple[str, float]) -> StoredTensors:
    """A checkpoint in bfloat16 whose experts in the thinker are of this dtype and so many bytes an element."""
    with torch.device("meta"):
        model = Qwen3OmniMoeForConditionalGeneration(config_of(sizes))
    found: dict[str, tuple[str, int, int]] = {}
    for name, parameter in model.named_parameters():
        dtype, width = expert if part_of(name) == "thinker experts" else ("BF16", 2.0)
        count = parameter.numel() if dtype == "BF16" else math.ceil(parameter.numel() * width)
        found[name] = (dtype, count, math.ceil(parameter.numel() * width))
    return found


def test_stored_files_have_the_sizes_of_their_types() -> None:
    config = config_of(SMALL)
    assert memory(config, stored(SMALL, ("BF16", 2.0))) == memory(config)
    plain = {part.name: part for part in memory(config)["thinker"].weights}
    packed = {part.name: part for part in memory(config, stored(SMALL, ("U8", 0.5)))["thinker"].weights}
    experts = packed.pop("thinker experts")
    assert (experts.elements, experts.stored_bytes) == (0, math.ceil(plain.pop("thinker experts").elements / 2))
    assert packed == plain


@pytest.mark.parametrize(
    ("said", "width"),
    [
        ({"quant_method": "awq", "bits": 4}, 0.5),
        ({"quant_method": "fp8"}, 1),
        (SimpleNamespace(quant_method="gptq", bits=8), 1),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 4}}}}, 0.5),
        ({"quant_method": "of tomorrow"}, 2),
        (None, 2),
    ],
)
def test_without_files_the_config_gives_the_width_of_quantized_weights(said: Any, width: float) -> None:
    config = config_of(SMALL)
    config.quantization_config = said
    [part] = [part for part in memory(config)["thinker"].weights if part.name == "thinker experts"]
    whole = elements(memory(config_of(SMALL)))["thinker experts"]
    found = part.elements * 2 + part.stored_bytes
    assert found == pytest.approx(whole * width, rel=0.06)
    assert part.quantizable is (width == 2)
    assert memory(config)["talker"] == memory(config_of(SMALL))["talker"]


def test_the_largest_picture_is_that_of_vllms_encoder_budget() -> None:
    encoder = memory(config_of(RELEASED))["thinker"].encoder
    assert encoder is not None
    assert (encoder.image_tokens, module.LARGEST_IMAGE_PIXELS) == (12544, 12544 * 32 * 32)


@pytest.mark.engine
def test_the_encoder_holds_the_counted_bytes(tmp_path: Path) -> None:
    """By running vLLM's encoder on two pictures; the program describes attention and rotation on CUDA."""
    program = Path(__file__).parents[1] / "support" / "encoder_peak.py"
    command = [sys.executable, str(program), str(tmp_path / "group")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    small, large = map(int, done.stdout.split())
    encoder = memory(config_of(RELEASED))["thinker"].encoder
    assert encoder is not None
    counted = (encoder.token_bytes + encoder.split_token_bytes) / 4 / ENCODER_PIECES
    assert small == large == pytest.approx(counted, rel=0.01)
