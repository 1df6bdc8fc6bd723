"""Parts of the Hugging Face config of a family that speaks."""

from __future__ import annotations

from transformers import PretrainedConfig

from vllm_omni_ext.errors import ConfigError


def part_of(config: PretrainedConfig, name: str) -> PretrainedConfig | None:
    """Return the part `name` of the config; None for the config of another model. ConfigError without sound output."""
    if not hasattr(config, name):
        return None
    if not config.enable_audio_output:
        raise ConfigError(f"model: this checkpoint has no sound output (enable_audio_output is false), so no {name}")
    return getattr(config, name)
