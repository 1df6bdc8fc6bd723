"""Makes vLLM's engine arguments, and the config from them, for a replica."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from pydantic import ValidationError
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.triton_utils import HAS_TRITON
from vllm.usage.usage_lib import UsageContext

from vllm_omni_ext.config.disaggregation import stage_path
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.plugins.spec import resolve
from vllm_omni_ext.runtime.launch.hf_overrides import ThenStage
from vllm_omni_ext.topology.engine_args import HF_OVERRIDES, WithOverrides
from vllm_omni_ext.topology.plan import Plan

HEAD = -1
"""Value of `api_process` for the process that starts the engines, which is not an API server."""

DEVICES = "vllm_omni_ext.devices"
"""Key of `additional_config` with a replica's devices. It makes replicas on different devices compile separately:
compiled code contains a device index, but vLLM's hash of a compilation includes `additional_config`, not `device_ids`.
"""

_FEWEST_API_PROCESSES = 2
"""Smallest `_api_process_count` of API servers. With 1, vLLM's API server does not keep the data of media, because its
only engine has all media that were sent earlier. With several replicas this fails, because each item was sent to one
replica only. With 2 or more, vLLM's API server keeps the data; `SentMedia` then leaves out what a replica has."""


def stage_engine_args(plan: Plan, replica_id: ReplicaId, *, api_process: int = HEAD) -> AsyncEngineArgs:
    """Return the engine arguments of a replica, which its engine and its clients use.

    Args:
        api_process: index of the calling API server; `HEAD` for the process that starts the engine.

    Raises:
        UnknownMember: the plan has no such replica.
        ConfigError: vLLM does not accept a value.
    """
    return any_replica_args(plan, replica_id.stage, devices=plan.replica(replica_id).devices, api_process=api_process)


def any_replica_args(
    plan: Plan, stage_name: str, *, devices: Sequence[int] = (), api_process: int = HEAD
) -> AsyncEngineArgs:
    """Return the engine arguments of any replica of a stage.

    Unlike `stage_engine_args`, this works for a stage whose replicas are all started by other processes.

    Args:
        devices: CUDA devices of the replica.
        api_process: see `stage_engine_args`.
    """
    stage = plan.stage(stage_name)
    values = {name: engine_value(stage.name, name, value) for name, value in stage.engine_args.items()}
    if devices:
        values["device_ids"] = list(devices)
        values["additional_config"] = {**values.get("additional_config", {}), DEVICES: list(devices)}
    return AsyncEngineArgs(
        model=plan.model,
        _api_process_count=max(_FEWEST_API_PROCESSES, plan.api_servers),
        _api_process_rank=api_process,
        **values,
    )


def engine_config(stage: str, args: AsyncEngineArgs, usage: UsageContext) -> VllmConfig:
    """Return vLLM's config for the engine arguments of a stage.

    Raises:
        ConfigError: vLLM does not accept the arguments; the message names the stage and is one line.
    """
    try:
        config = args.create_engine_config(usage)
    except (ValueError, TypeError, LookupError, AttributeError, ImportError) as err:  # the last four: wrong types
        said = " ".join((_first(err) if isinstance(err, ValidationError) else str(err)).split())
        raise ConfigError(f"stage '{stage}': vLLM refuses its engine arguments: {said}") from err
    if config.lora_config is not None and config.model_config.is_moe and not HAS_TRITON:
        raise ConfigError(
            f"{stage_path(stage)}.engine.enable_lora: LoRA of a model with experts needs Triton, which is not "
            "on this machine; without it each request ends the engine"
        )
    if config.parallel_config.enable_expert_parallel and config.model_config.is_moe and current_platform.is_cpu():
        raise ConfigError(
            f"{stage_path(stage)}.engine.enable_expert_parallel: vLLM's kernel for experts on a CPU ends the process "
            "if a rank has some of the experts only; without it each rank has a part of every expert; remove it"
        )
    return as_asked(config, args)


def _first(errors: ValidationError) -> str:
    """Return the text of the first error, with the name of the field unless vLLM itself has written the text."""
    first = errors.errors()[0]
    if first["type"] == "value_error":
        return first["msg"].removeprefix("Value error, ")
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"


def as_asked(config: VllmConfig, args: AsyncEngineArgs) -> VllmConfig:
    """Restore, in place, the media settings that vLLM changes for an engine that receives KV caches. Return `config`.

    vLLM makes such an engine accept media embeddings and missing media, because it expects its own proxy in front of
    it. This server has no such proxy: it accepts embeddings only if the arguments allow them, and no missing media.
    """
    media = config.model_config.multimodal_config
    if media is not None:
        media.enable_mm_embeds = args.enable_mm_embeds
        media.allow_missing_mm_embeddings = False
    return config


def engine_value(stage: str, name: str, value: Any) -> Any:
    """Return the object that vLLM expects for an engine argument of a stage, e.g. a config for a mapping.

    Raises:
        ConfigError: vLLM does not accept the value.
    """
    if isinstance(value, WithOverrides):
        return ThenStage(value.function, value.overrides)
    if name == HF_OVERRIDES and isinstance(value, str):
        return resolve(value)
    if isinstance(value, Mapping) and name in _config_classes():
        cls = _config_classes()[name]
        try:
            return cls(**value)
        except (TypeError, ValueError) as err:
            raise ConfigError(f"{stage_path(stage)}.engine.{name}: {' '.join(str(err).split())}") from err
    return value


@cache
def _config_classes() -> dict[str, type]:
    """Return vLLM's config class by `EngineArgs` field, for fields whose value is a config object or a mapping."""
    found: dict[str, type] = {}
    for field in dataclasses.fields(AsyncEngineArgs):
        for option in typing.get_args(field.type) or (field.type,):
            if isinstance(option, type) and dataclasses.is_dataclass(option):
                found[field.name] = option
    return found
