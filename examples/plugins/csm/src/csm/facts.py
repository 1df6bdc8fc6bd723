"""Sizes of a checkpoint's stages, from which the core computes the memory of a deployment on CUDA devices."""

from collections.abc import Mapping
from typing import Any

from csm.hf_configs import MOST_CODES
from csm.payloads import BACKBONE, CODEC
from vllm_omni_ext.plugins.memory import StageFacts, StoredTensors, WeightPart, measured

WEIGHTS = {
    BACKBONE: (WeightPart(names=r"(?!codec_model\.)", split=False),),
    CODEC: (WeightPart(names=r"codec_model\.", split=False, float32=True),),
}


def facts(hf_config: Any, params: Mapping[str, Any], stored: StoredTensors | None = None) -> dict[str, StageFacts]:
    """Return the facts of each stage; without the checkpoint's files the weights are not known."""
    weights = {stage: measured(parts, stored) if stored else () for stage, parts in WEIGHTS.items()}
    config, codec = hf_config, hf_config.codec_config
    heads = config.num_attention_heads + config.num_key_value_heads
    backbone = StageFacts(
        max_model_len=config.max_position_embeddings,
        weights=weights[BACKBONE],
        kv_layers=config.num_hidden_layers,
        kv_heads=config.num_key_value_heads,
        kv_head_dim=config.head_dim,
        step_elements=6 * config.hidden_size + 3 * config.intermediate_size + 2 * heads * config.head_dim,
        vocabulary=config.vocab_size,
        sequence_elements=config.max_position_embeddings * config.hidden_size,  # its input rows
    )
    window = 2 * codec.num_hidden_layers * codec.sliding_window * codec.hidden_size
    part = MOST_CODES // config.num_codebooks * codec.frame_size * codec.num_filters
    sound = StageFacts(
        max_model_len=MOST_CODES, weights=weights[CODEC], pass_elements=4 * part, sequence_elements=window
    )
    return {BACKBONE: backbone, CODEC: sound}
