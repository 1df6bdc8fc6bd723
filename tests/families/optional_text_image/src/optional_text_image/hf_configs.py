"""The part of the checkpoint's config that each stage's engine sees as its model."""

from __future__ import annotations

from transformers import PretrainedConfig

from optional_text_image.family import ARCHITECTURE, PAINTER_ARCHITECTURE


def language_model(config: PretrainedConfig) -> PretrainedConfig:
    """The config as that of a Llama model."""
    return _as(config, "LlamaForCausalLM")


def painter(config: PretrainedConfig) -> PretrainedConfig:
    """The same config for the painter."""
    return _as(config, PAINTER_ARCHITECTURE)


def _as(config: PretrainedConfig, architecture: str) -> PretrainedConfig:
    if config.architectures == [ARCHITECTURE]:  # vLLM calls this with a dummy config first
        config.architectures = [architecture]
    return config
