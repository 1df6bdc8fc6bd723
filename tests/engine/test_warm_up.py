"""Steps of the warm-up use every variant of vLLM's fused MoE kernel that a request can use."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe import fused_moe
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.layers.rotary_embedding.common import ApplyRotaryEmb

from vllm_omni_ext.engine.warm_up import encoder_attention, token_counts

EXPERTS, STEP = 128, 8192
WIDTHS = (384, 768, 1024)
TUNED = sorted(
    file
    for width in WIDTHS
    for file in Path(fused_moe.__file__).with_name("configs").glob(f"E={EXPERTS},N={width},device_name=NVIDIA*.json")
)

Tiles = Callable[[int], Mapping[str, Any]]


def default(dtype: str | None, block_shape: list[int] | None) -> Tiles:
    return lambda tokens: fused_moe.get_default_config(tokens, EXPERTS, 768, 2048, 8, dtype, block_shape)


def tuned(file: Path) -> Tiles:
    tiles = {int(size): each for size, each in json.loads(file.read_text()).items() if size != "triton_version"}
    return lambda tokens: tiles[min(tiles, key=lambda size: abs(size - tokens))]


ALL = {
    "default bfloat16": default(None, None),
    "default fp8": default("fp8_w8a8", None),
    "default fp8 in blocks": default("fp8_w8a8", [128, 128]),
    **{file.name: tuned(file) for file in TUNED},
}


@pytest.mark.slow
@pytest.mark.parametrize("tiles", ALL.values(), ids=list(ALL))
def test_each_variant_is_compiled_by_the_warm_up(tiles: Tiles) -> None:
    constants = [tuple(sorted(tiles(tokens).items())) for tokens in range(STEP + 1)]

    def variants(tokens: range | list[int], chosen: int) -> set[tuple[Any, ...]]:
        """Constants of the kernel, and whether its integers are multiples of 16, with this many experts a token."""
        return {(constants[each], each * chosen % 16 == 0) for each in tokens}

    for captured, chosen in itertools.product((0, 512), (6, 8)):
        every = variants(range(captured + 1, STEP + 1), chosen)
        assert variants(token_counts(captured, STEP), chosen) == every


def test_no_step_is_larger_than_the_engine_allows_or_runs_in_a_graph() -> None:
    assert token_counts(512, 600) == [513, 520, 599, 600]
    assert token_counts(512, 512) == []


def test_rotary_embeddings_of_text_layers_are_no_attention_of_an_encoder() -> None:
    with set_current_vllm_config(VllmConfig()):
        text = get_rope(64, 128)
        encoder = torch.nn.Module()
        encoder.apply_rotary_emb = ApplyRotaryEmb(enforce_enable=True)
        encoder.num_attention_heads_per_partition = encoder.hidden_size_per_attention_head = 16
    assert isinstance(text.apply_rotary_emb, ApplyRotaryEmb)
    assert encoder_attention([text]) is None
    assert encoder_attention([text, encoder]) is encoder
