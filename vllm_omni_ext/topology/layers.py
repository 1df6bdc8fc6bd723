"""Merges the engine arguments of one stage from all layers: the strongest layer wins, nothing is dropped silently."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_omni_ext.config.disaggregation import stage_path
from vllm_omni_ext.config.schema import ReplicasConfig
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.plugins.spec import StageSpec

SHARED_FIELDS = frozenset(
    {
        "code_revision",
        "config_format",
        "disable_log_stats",
        "download_dir",
        "dtype",
        "enable_sleep_mode",
        "enforce_eager",
        "hf_config_path",
        "hf_token",
        "ignore_patterns",
        "load_format",
        "log_level",
        "logging_config",
        "model_loader_extra_config",
        "model_weights",
        "profiler_config",
        "pt_load_map_location",
        "revision",
        "safetensors_load_strategy",
        "safetensors_prefetch_block_size",
        "safetensors_prefetch_num_threads",
        "seed",
        "trust_remote_code",
        "use_tqdm_on_load",
    }
)
"""Stock flags about the whole model or the whole server, which apply to every stage. All other stock flags apply to the
frontend alone.
"""

_ONE_HOST = "a replica runs on one host; remove it"
_REPLICAS = "write {path}.replicas instead"
_API = "write api_servers instead"
DATA_PARALLEL: Mapping[str, object] = {
    "data_parallel_size": 1,
    "data_parallel_size_local": None,
    "data_parallel_rank": None,
    "data_parallel_start_rank": None,
    "data_parallel_address": None,
    "data_parallel_rpc_port": None,
    "data_parallel_hybrid_lb": False,
    "data_parallel_external_lb": False,
    "data_parallel_multi_port_external_lb": False,
    "enable_elastic_ep": False,
}
"""Engine fields that a stage's replicas replace, with the one value that is accepted."""

_RESERVED: Mapping[str, tuple[str, object]] = {
    "model": ("the model is given once, on the command line; remove it", None),
    "device_ids": ("write {path}.devices instead", None),
    **{name: (_REPLICAS, harmless) for name, harmless in DATA_PARALLEL.items()},
    "enable_fault_tolerance": ("a lost replica is handled by the pool; remove it", False),
    "nnodes": (_ONE_HOST, 1),
    "node_rank": (_ONE_HOST, 0),
    "_api_process_count": (_API, 1),
    "_api_process_rank": (_API, 0),
}
"""Engine fields that the plan sets: the advice in the error, and the one value that is accepted."""

_INSTEAD: Mapping[str, str] = {"pipeline_parallel_size": "write tensor_parallel_size instead"}
"""The advice for a field that a pipeline fixes."""


def user_engine_args(
    spec: StageSpec, stage: ReplicasConfig, text_args: Mapping[str, Any], takes_stock_flags: bool
) -> dict[str, Any]:
    """The user's engine arguments of a stage: `--stage-overrides` over stock flags over the file.

    Args:
        takes_stock_flags: all stock flags apply to the stage; otherwise only those about the whole model.

    Raises:
        ConfigError: a field that the pipeline or the plan sets.
    """
    path = f"{stage_path(spec.name)}.engine"
    flags = {
        key: value
        for key, value in text_args.items()
        # A shared flag does not reach a stage whose pipeline sets the field.
        if key != "model"
        and (takes_stock_flags or (key in SHARED_FIELDS and key not in {**spec.engine, **spec.engine_defaults}))
    }
    for layer, prefix in ((flags, ""), (stage.engine, f"{path}."), (stage.engine_overrides, f"{path}.")):
        for key, value in layer.items():
            _check_free(f"{prefix}{key}", key, value, spec)
    _check_cache(path, stage)
    cache = {} if stage.kv_cache_bytes is None else {"kv_cache_memory_bytes": stage.kv_cache_bytes}
    return {**stage.engine, **cache, **flags, **stage.engine_overrides}


def parallel_size(path: str, field: str, args: Mapping[str, Any]) -> int:
    """Read `tensor_parallel_size` or `pipeline_parallel_size`."""
    value = args.get(field, 1)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{path}.engine.{field}: must be an integer >= 1, got {value!r}")
    return value


def _check_free(where: str, key: str, value: Any, spec: StageSpec) -> None:
    if key in spec.engine and value != spec.engine[key]:
        advice = _INSTEAD.get(key, "remove it")
        raise ConfigError(f"{where}: the pipeline sets it to {spec.engine[key]!r} for '{spec.name}'; {advice}")
    if key in _RESERVED:
        advice, harmless = _RESERVED[key]
        if value != harmless:
            raise ConfigError(f"{where}: {advice.format(path=stage_path(spec.name))}")


def _check_cache(path: str, stage: ReplicasConfig) -> None:
    for layer in (stage.engine, stage.engine_overrides):
        if stage.kv_cache_bytes is not None and "kv_cache_memory_bytes" in layer:
            where = path.removesuffix(".engine")
            raise ConfigError(
                f"{path}.kv_cache_memory_bytes: {where}.kv_cache_bytes says the same; keep one of the two"
            )
