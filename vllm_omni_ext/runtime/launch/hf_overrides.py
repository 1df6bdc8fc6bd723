"""Applies `--hf-overrides`, which are about the config of the whole checkpoint, to the config of each stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig
from vllm.config import ModelConfig
from vllm.transformers_utils.config import get_config

from vllm_omni_ext.plugins.spec import resolve


@dataclass(frozen=True)
class ThenStage:
    """Function for vLLM's `hf_overrides`: applies the user's overrides, then the function of the stage.

    Instances are sent to other processes.

    Attributes:
        function: "pkg.mod:attr" of the stage's function.
        overrides: the user's overrides: a mapping, or a function.
    """

    function: str
    overrides: Any

    def __call__(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """Return the config of the stage."""
        result: PreTrainedConfig = resolve(self.function)(overridden(config, self.overrides))
        return result


def overridden(config: PreTrainedConfig, overrides: Any) -> PreTrainedConfig:
    """Return a config with the user's overrides, applied in place.

    vLLM first passes a dummy config without nested configs, and overrides of these are then left out.
    """
    if callable(overrides):
        result: PreTrainedConfig = overrides(config)
        return result
    present = {key: value for key, value in overrides.items() if not isinstance(value, dict) or hasattr(config, key)}
    update(config, present)
    return config


def update(config: PreTrainedConfig, overrides: Mapping[str, Any]) -> None:
    """Set attributes of a config; those that are configs themselves are updated."""
    for key, value in overrides.items():
        nested = getattr(config, key, None)
        if isinstance(nested, PreTrainedConfig) and isinstance(value, dict):
            update(nested, value)
        else:
            setattr(config, key, value)


def whole_config(model: ModelConfig) -> PreTrainedConfig:
    """Return the config of the whole checkpoint, with the user's overrides.

    Args:
        model: config of any stage; that of a stage with a function may be a part of the checkpoint's.
    """
    if not callable(model.hf_overrides):
        return model.hf_config
    config = get_config(model.model, model.trust_remote_code, model.revision)
    given = model.hf_overrides
    return overridden(config, given.overrides) if isinstance(given, ThenStage) else config
