"""Sequence lengths and cache sizes of a Qwen3-Omni config. Reads plain attributes: no vLLM, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.plugins.memory import ModelFacts

_FLOAT32_BYTES = 4
_KEY_AND_VALUE = 2


def facts(hf_config: Any, params: Mapping[str, Mapping[str, Any]]) -> ModelFacts:
    """Read the facts of a checkpoint.

    Args:
        hf_config: the Hugging Face config of the whole model.
        params: default parameters by stage; the talker's `max_tokens` is the largest number of frames of a reply.

    Raises:
        ConfigError: the checkpoint has only the thinker.
    """
    if not hf_config.enable_audio_output:
        raise ConfigError("model: this checkpoint has no sound output (enable_audio_output is false); leave --omni out")
    thinker = hf_config.thinker_config.text_config
    talker = hf_config.talker_config.text_config
    frames = int(params["talker"]["max_tokens"])
    return ModelFacts(
        max_model_len={
            "thinker": thinker.max_position_embeddings,
            "talker": talker.max_position_embeddings,
            "code2wav": frames * hf_config.talker_config.num_code_groups,
        },
        kv_bytes_per_token={"thinker": _kv_bytes(thinker), "talker": _kv_bytes(talker)},
    )


def _kv_bytes(text_config: Any) -> int:
    head_dim: int = text_config.head_dim
    layers: int = text_config.num_hidden_layers
    heads: int = text_config.num_key_value_heads
    return layers * heads * head_dim * _KEY_AND_VALUE * _FLOAT32_BYTES
