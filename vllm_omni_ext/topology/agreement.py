"""Hashes of the settings and the model that must be equal on all hosts; the head compares them when a replica joins."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from vllm_omni_ext.config.connectors import LOCAL
from vllm_omni_ext.config.disaggregation import stage_path
from vllm_omni_ext.config.schema import INCOMING, OUTGOING
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.topology.plan import Plan

_HASH_BYTES = 8

LOCAL_FIELDS = frozenset(
    {
        # Resources and processes of the engine on this host.
        "cpu_offload_gb",
        "cpu_offload_params",
        "device_ids",
        "distributed_executor_backend",
        "distributed_timeout_seconds",
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "master_addr",
        "master_port",
        "max_num_seqs",
        "num_gpu_blocks_override",
        "numa_bind",
        "numa_bind_cpus",
        "numa_bind_nodes",
        "shutdown_timeout",
        # Location and loading of the model on this host; the model itself is compared with `models_of`.
        "download_dir",
        "hf_config_path",
        "hf_token",
        "max_parallel_loading_workers",
        "pt_load_map_location",
        "revision",
        "safetensors_load_strategy",
        "safetensors_prefetch_block_size",
        "safetensors_prefetch_num_threads",
        "use_tqdm_on_load",
        # Logging.
        "aggregate_engine_logging",
        "collect_detailed_traces",
        "cudagraph_metrics",
        "disable_log_stats",
        "enable_log_requests",
        "enable_logging_iteration_details",
        "enable_mfu_metrics",
        "kv_cache_metrics",
        "kv_cache_metrics_sample",
        "log_config_file",
        "log_level",
        "logging_config",
        "otlp_traces_endpoint",
        "profiler_config",
        "show_hidden_metrics_for_version",
        # Used only by the head's server.
        "allowed_local_media_path",
        "allowed_media_domains",
        "generation_config",
        "override_generation_config",
        "renderer_num_workers",
        "served_model_name",
    }
)
"""`EngineArgs` fields in which replicas of one stage may differ. All other fields are in `config_hash`, because they
change results or messages."""

_WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})
_CONFIG = "config.json"
_CONFIG_NOISE = frozenset({"_name_or_path", "transformers_version"})
"""Keys of `config.json` that are not compared: the checkpoint's path, and the version of Transformers that wrote the
file."""

_SAMPLES = 16
_SAMPLE_BYTES = 4096
"""Number of samples of a weight file that are hashed, and bytes of each sample. A fine-tuned model has the same tensor
names and sizes as its base, so that only the samples distinguish them."""


def config_hash(plan: Plan, stage_name: str) -> str:
    """Return a hash of all settings that must be equal in all replicas of a stage: 16 hexadecimal digits.

    A headless node sends the hash when one of its replicas joins a head. The hash does not include memory, devices,
    logging, default parameters and the number of replicas.

    Raises:
        UnknownMember: no such stage.
        ConfigError: an engine argument is an object whose text differs between processes, so that it cannot be
            compared.
    """
    stage = plan.stage(stage_name)
    path = f"{stage_path(stage.name)}.engine"
    content = {
        "pipeline": plan.pipeline,
        "stage": stage.name,
        "edges": sorted([edge.source, edge.target, edge.kind] for edge in plan.edges),
        "engine": {
            name: _plain(f"{path}.{name}", _without_places(value) if name == "additional_config" else value)
            for name, value in stage.engine_args.items()
            if name not in LOCAL_FIELDS
        },
    }
    return _digest(_text(content))


def models_of(plan: Plan) -> dict[str, str]:
    """Return the identity of the model that each stage loads (`model_identity`), with the stage's revision and config.

    The files are read once for all stages with the same revision and config.
    """
    places = {
        stage.name: (stage.engine_args.get("revision"), stage.engine_args.get("hf_config_path"))
        for stage in plan.stages
    }
    models = {
        (revision, config): model_identity(plan.model, revision=revision, config_path=config)
        for revision, config in set(places.values())
    }
    return {name: models[place] for name, place in places.items()}


def model_identity(model: str, *, revision: str | None = None, config_path: str | None = None) -> str:
    """Return a text that identifies a model, independent of its path on this host.

    Args:
        model: as on the command line: a directory, a file or a hub id.
        revision: revision of a hub id.
        config_path: `EngineArgs.hf_config_path`, if the config is not in the directory of the model.

    Returns:
        For a directory or file, a hash of its config and of the names, sizes and samples of its weights; for a hub id,
        the id with its revision. A config in a directory counts by its content, one of the hub by its id.

    Raises:
        ConfigError: the model cannot be read.
    """
    path = Path(model).expanduser()
    try:
        folder = Path(config_path).expanduser() if config_path else path
        config = _config(folder) if folder.exists() else config_path
        if not path.exists():
            place = config if isinstance(config, str) else _digest(_text(config))
            return f"{model}@{revision or 'main'}" + (f" config {place}" if config_path else "")
        weights = [path] if path.is_file() else sorted(p for p in path.iterdir() if p.suffix in _WEIGHTS)
        content = [config, *map(_weight_file, weights)]
    except OSError as err:
        raise ConfigError(f"model: '{model}' cannot be read: {err}") from err
    return _digest(_text(content))


def _config(folder: Path) -> Any:
    file = folder / _CONFIG
    if not file.is_file():
        return None
    try:
        return json.loads(file.read_bytes(), object_hook=_without_noise)
    except ValueError as err:
        raise ConfigError(f"model: '{file}' is not JSON: {err}") from err


def _without_noise(value: dict[str, Any]) -> dict[str, Any]:
    return {key: item for key, item in value.items() if key not in _CONFIG_NOISE}


def _weight_file(path: Path) -> list[Any]:
    """Return [name of a weight file, its size in bytes, hash of evenly spread samples from its start to its end]."""
    size = path.stat().st_size
    last = max(0, size - _SAMPLE_BYTES)
    found = hashlib.sha256()
    with path.open("rb") as file:
        for number in range(_SAMPLES):
            file.seek(last * number // (_SAMPLES - 1))
            found.update(file.read(_SAMPLE_BYTES))
    return [path.name, size, found.hexdigest()]


def _without_places(additional: Any) -> Any:
    """Return vLLM's `additional_config` without the connector settings that may differ between hosts (`LOCAL`)."""
    ends = {key: additional[key] for key in (OUTGOING, INCOMING) if key in additional}
    agreed = {
        key: {edge: {k: v for k, v in fields.items() if k not in LOCAL} for edge, fields in edges.items()}
        for key, edges in ends.items()
    }
    return {**additional, **agreed}


def _plain(path: str, value: Any) -> Any:
    """Convert an engine argument to plain JSON data that has the same text in every process.

    Args:
        path: path of the value in the configuration, for the ConfigError about a value without such a text.
    """
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(path, item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(path, item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((_plain(path, item) for item in value), key=_text)
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(path, getattr(value, field.name)) for field in fields(value) if field.init}
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}:{value.__qualname__}"
    text = repr(value)
    if hex(id(value)) in text:
        raise ConfigError(f"{path}: a {type(value).__name__} cannot be compared between hosts; write plain data")
    return text


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=_HASH_BYTES).hexdigest()
