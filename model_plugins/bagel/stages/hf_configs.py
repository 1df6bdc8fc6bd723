"""`hf_overrides` of the stages: the checkpoint's config with the architecture of the stage's model class.

vLLM first calls each function with a dummy config, which the function returns unchanged. The functions are sent to
other processes by name, so they stay at module level.
"""

from __future__ import annotations

from transformers import PretrainedConfig


def ar(config: PretrainedConfig) -> PretrainedConfig:
    """Return the config with M-RoPE, with which all tokens of a picture can have one position.

    All three rows of positions are equal, so the sections have no effect: the first section has all dimensions.
    """
    if hasattr(config, "llm_config"):
        llm = config.llm_config
        rotated = llm.hidden_size // llm.num_attention_heads
        llm.rope_parameters = {**llm.rope_parameters, "mrope_section": [rotated // 2, 0, 0]}
    return _named(config, "BagelUnderstanding")


def dit(config: PretrainedConfig) -> PretrainedConfig:
    """Return the config of the stage that generates pictures."""
    return _named(config, "BagelDit")


def single(config: PretrainedConfig) -> PretrainedConfig:
    """Return the config of the single stage that generates texts and pictures."""
    return _named(config, "BagelSingle")


def _named(config: PretrainedConfig, architecture: str) -> PretrainedConfig:
    if hasattr(config, "llm_config"):
        config.architectures = [architecture]
    return config
