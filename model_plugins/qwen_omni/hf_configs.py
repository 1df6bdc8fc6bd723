"""Reads the config of one stage from the Hugging Face config of a whole Qwen3-Omni or Qwen2.5-Omni checkpoint."""

from __future__ import annotations

from transformers import PretrainedConfig

from vllm_omni_ext.errors import ConfigError


def part_of(config: PretrainedConfig, name: str) -> PretrainedConfig | None:
    """Return a stage's config from the whole checkpoint's config.

    Args:
        name: field of the config, e.g. "talker_config".

    Returns:
        the stage's config; None if there is no such field, as in the dummy config that vLLM passes first.

    Raises:
        ConfigError: the checkpoint has no sound output.
    """
    if not hasattr(config, name):
        return None
    if not config.enable_audio_output:
        raise ConfigError(f"model: this checkpoint has no sound output (enable_audio_output is false), so no {name}")
    return getattr(config, name)
