"""Sequence lengths and cache sizes of a BAGEL config. Reads plain attributes, without vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_omni_ext.model_plugins.bagel.memory import FLOAT32_BYTES, kv_bytes_per_token
from vllm_omni_ext.model_plugins.bagel.stages.stage_memory import config_sizes
from vllm_omni_ext.plugins.memory import ModelFacts


def facts(hf_config: Any, params: Mapping[str, Mapping[str, Any]]) -> ModelFacts:
    """Read the facts of a checkpoint.

    Args:
        hf_config: the Hugging Face config of the whole model.
        params: default parameters by stage; no fact depends on them.

    The length of `dit` is also the number of tokens of its denoise steps, unless the user sets another one.
    """
    longest = hf_config.llm_config.max_position_embeddings
    return ModelFacts(
        max_model_len={"ar": longest, "dit": longest},
        kv_bytes_per_token={"ar": kv_bytes_per_token(config_sizes(hf_config).llm, FLOAT32_BYTES)},
    )
