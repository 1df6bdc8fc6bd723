"""`hf_overrides` of the stages: the config that each stage's engine uses.

vLLM first calls each function with a config of its own, which is returned unchanged.
"""

from transformers import PretrainedConfig

MOST_CODES = 1 << 16
"""Longest part of the codec, in codes: after the loss of a replica, all frames so far are one part."""


def backbone(config: PretrainedConfig) -> PretrainedConfig:
    """Name the model class; a `CsmConfig` has all sizes of the backbone under the names of Llama."""
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
