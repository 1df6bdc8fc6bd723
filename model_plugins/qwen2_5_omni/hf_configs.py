"""`hf_overrides` of the stages: the part of a Qwen2.5-Omni config that a stage's engine uses as its model config.

vLLM first calls each function with a dummy config, which the function returns unchanged. The functions are sent to
other processes by name, so they stay at module level.
"""

from __future__ import annotations

from transformers import PretrainedConfig

from vllm_omni_ext.model_plugins.qwen_omni.hf_configs import part_of


def talker(config: PretrainedConfig) -> PretrainedConfig:
    """Return `talker_config` with added fields that the talker needs.

    These are `thinker_vocab_size` (rows of the thinker's embedding table) and `codes` (ids below it are codes of
    token2wav). As in Transformers, queries, keys and values have biases, and the output has none.
    """
    part = part_of(config, "talker_config")
    if part is None:
        return config
    part.architectures = ["Qwen2_5OmniTalker"]
    part.thinker_vocab_size = config.thinker_config.text_config.vocab_size
    part.codes = config.token2wav_config.dit_config.num_embeds + 1
    part.qkv_bias, part.attention_bias = True, False
    return part


def token2wav(config: PretrainedConfig) -> PretrainedConfig:
    """Return `token2wav_config` with the fields that vLLM requires of any model; codes are its tokens."""
    part = part_of(config, "token2wav_config")
    if part is None:
        return config
    dit = part.dit_config
    part.architectures = ["Qwen2_5OmniToken2Wav"]
    part.vocab_size = dit.num_embeds + 1
    part.hidden_size, part.num_attention_heads = dit.hidden_size, dit.num_attention_heads
    part.num_hidden_layers = dit.num_hidden_layers
    part.max_position_embeddings = dit.max_position_embeddings // dit.repeats
    return part
