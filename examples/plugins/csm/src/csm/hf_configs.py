"""The `hf_overrides` functions of the stages: each returns the Hugging Face config that the stage's engine uses.

vLLM first calls each function with an empty config, which is returned unchanged.
"""

from transformers import PretrainedConfig

MOST_CODES = 1 << 16
"""Longest part of the codec, in codes: after the loss of a replica, all frames so far are one part."""


def backbone(config: PretrainedConfig) -> PretrainedConfig:
    """Set the model class in a `CsmConfig`, which has the backbone's sizes under the names of Llama's config."""
    if hasattr(config, "depth_decoder_config"):
        config.architectures = ["CsmBackbone"]
    return config


def codec(config: PretrainedConfig) -> PretrainedConfig:
    """Return the codec's part, with the fields that vLLM requires of each model; codes are its tokens."""
    if not hasattr(config, "codec_config"):
        return config
    part = config.codec_config
    part.architectures = ["CsmCodec"]
    part.vocab_size = part.codebook_size
    part.max_position_embeddings = MOST_CODES
    part.codebooks = config.num_codebooks
    return part
