"""Reads the properties of the model and the machine that the planner needs: config, tensor sizes, devices, memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
from huggingface_hub.constants import HF_HUB_OFFLINE
from huggingface_hub.errors import StrictDataclassError
from vllm.platforms import current_platform
from vllm.transformers_utils.config import get_config

from vllm_omni_ext.cli.checkpoint import checkpoint_folder, stored_tensors
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.plugins.memory import ModelFacts
from vllm_omni_ext.plugins.spec import ModelFamily, resolve
from vllm_omni_ext.runtime.launch.hf_overrides import update
from vllm_omni_ext.topology.machine import VARIABLES, Machine


def load_hf_config(model: str, text_args: Mapping[str, Any]) -> Any:
    """Return the Hugging Face config of a local directory or a hub id, read as vLLM reads it.

    Args:
        text_args: `EngineArgs` fields that the user has set.

    Raises:
        ConfigError: the config cannot be read.
    """
    if model.startswith(("/", "./", "../", "~")) and not Path(model).is_dir():
        raise ConfigError(f"model: there is no folder '{model}'")
    given = text_args.get("hf_overrides")
    overrides: dict[str, Any] = given if isinstance(given, dict) else {}
    try:
        config = get_config(
            text_args.get("hf_config_path") or model,
            text_args.get("trust_remote_code", False),
            text_args.get("revision"),
            text_args.get("code_revision"),
            text_args.get("config_format", "auto"),
            # `get_config` would replace nested configs by dictionaries; vLLM's `ModelConfig` updates them.
            hf_overrides_kw={key: value for key, value in overrides.items() if not isinstance(value, dict)},
        )
        update(config, {key: value for key, value in overrides.items() if isinstance(value, dict)})
    except (OSError, ValueError, TypeError, AttributeError, StrictDataclassError) as err:  # the last three: wrong types
        reason = " ".join(str(err).split())
        if HF_HUB_OFFLINE and not Path(model).exists():
            reason = "HF_HUB_OFFLINE is set, and the model is not in the local cache; download it first, or unset it"
        raise ConfigError(f"model: the config of '{model}' cannot be read: {reason}") from err
    return config


def architecture(model: str, hf_config: Any) -> str:
    """Return the first entry of the config's `architectures`, by which vLLM selects the model class."""
    names = hf_config.architectures
    if not names:
        raise ConfigError(f"model: the config of '{model}' has no 'architectures'")
    return str(names[0])


def model_facts(
    model: str, family: ModelFamily, hf_config: Any, params: Mapping[str, Any], text_args: Mapping[str, Any]
) -> ModelFacts:
    """Return the sizes that the planner needs of each stage: weights, KV cache, context length.

    Args:
        params: default parameters of requests, by stage.
        text_args: `EngineArgs` fields that the user has set.
    """
    if not family.facts:
        return {}
    stored = stored_tensors(checkpoint_folder(model, text_args.get("revision"), text_args.get("download_dir")))
    facts: ModelFacts = resolve(family.facts)(hf_config, params, stored)
    return facts


def detect_machine() -> Machine:
    """Return the cores, memory and devices of this machine, as vLLM detects them."""
    if current_platform.is_cuda_alike():
        devices = current_platform.device_count()
        if not devices:
            raise ConfigError("machine: no CUDA device is visible; check CUDA_VISIBLE_DEVICES")
    elif current_platform.is_cpu():
        devices = 0
    else:
        raise ConfigError(f"machine: platform '{current_platform.device_type}' is not supported; use CUDA or CPU")
    return replace(
        detect_host(), platform="cuda" if devices else "cpu", device_count=devices, device_bytes=_device_bytes(devices)
    )


def detect_host() -> Machine:
    """Return the cores, the memory and the variables of this machine, without its devices."""
    return Machine(
        platform="cpu",
        device_count=0,
        cpu_count=len(os.sched_getaffinity(0)),
        memory_bytes=psutil.virtual_memory().total,
        variables={name: os.environ[name] for name in VARIABLES if os.environ.get(name)},
    )


def _device_bytes(devices: int) -> tuple[int, ...]:
    """Return each CUDA device's memory in bytes; empty without NVML, as CUDA would be initialised in this process."""
    if not devices or not current_platform.is_cuda() or not isinstance(current_platform, _nvml_platform()):
        return ()
    return tuple(current_platform.get_device_total_memory(device) for device in range(devices))


def _nvml_platform() -> Any:
    from vllm.platforms.cuda import NvmlCudaPlatform

    return NvmlCudaPlatform
