"""Transformers' Qwen3-Omni model in the sizes of the trained tiny checkpoint."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from dev.training.tiny_omni.words import world_vocabulary
from vllm_omni_ext.model_plugins.qwen3_omni.tiny import config

TRAINED = replace(
    config.SMALL,
    name="trained",
    accept_hidden_layer=3,
    thinker={
        **config.SMALL.thinker,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "moe_intermediate_size": 128,
    },
    talker={
        **config.SMALL.talker,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "moe_intermediate_size": 96,
        "shared_expert_intermediate_size": 128,
    },
    predictor={
        **config.SMALL.predictor,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    audio={
        **config.SMALL.audio,
        "d_model": 128,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 256,
        "downsample_hidden_size": 16,
    },
    vision={**config.SMALL.vision, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2},
    code2wav={
        **config.SMALL.code2wav,
        "hidden_size": 64,
        "intermediate_size": 192,
        "decoder_dim": 128,
        "sliding_window": 8,
        "upsample_rates": (2, 3, 4, 4, 5),
        "layer_scale_initial_scale": 0.1,
    },
)
"""Sizes of the trained checkpoint; the code predictor is as wide as the talker, as in the released checkpoint."""


@cache
def whole_config() -> dict[str, Any]:
    """Return `config.json` of the trained checkpoint."""
    return config.model_config(TRAINED, world_vocabulary())


def build(seed: int) -> Any:
    """Return a `Qwen3OmniMoeForConditionalGeneration` with starting weights from a seed."""
    import torch
    from transformers import Qwen3OmniMoeConfig, Qwen3OmniMoeForConditionalGeneration

    torch.manual_seed(seed)
    return Qwen3OmniMoeForConditionalGeneration(Qwen3OmniMoeConfig(**whole_config()))
