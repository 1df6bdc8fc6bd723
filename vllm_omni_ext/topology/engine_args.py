"""Merges the engine arguments of a stage: those of the user, from file, flags and overrides, and the pipeline's. Pure.

Each argument of the user is used, or refused with an error.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_omni_ext.config.checks import unknown_key
from vllm_omni_ext.config.connectors import connector_settings
from vllm_omni_ext.config.disaggregation import stage_path
from vllm_omni_ext.config.schema import INCOMING, OUTGOING, OmniConfig, ReplicasConfig
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.plugins.spec import PipelineSpec, StageSpec

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
        "hf_overrides",
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
        "scheduling_policy",
        "seed",
        "trust_remote_code",
        "use_tqdm_on_load",
    }
)
"""`EngineArgs` fields about the whole model or the whole server, whose `vllm serve` flags apply to every stage. All
other flags of vLLM apply only to the frontend, i.e. to the stage whose tokenizer and chat template the server uses."""

HF_OVERRIDES = "hf_overrides"
"""Name of the engine argument with overrides of the model's config. A pipeline may set a stage's to the name of a
function; overrides of the user are then applied before it (`WithOverrides`)."""

COMPILATION = "compilation_config"
"""Name of the engine argument with vLLM's compilation settings."""

KV_EVENTS, EVENTS_ENDPOINT = "kv_events_config", "tcp://*:5557"
"""Name of the engine argument with vLLM's settings of KV cache events, and vLLM's default of their address."""

BY_PRIORITY = "priority"
"""vLLM's scheduling policy that orders requests by their priority, the lowest first."""

Connections = Mapping[str, Mapping[str, Any]]
"""Settings of connectors, which transfer tensors between stages, by the name of the edge between two stages."""

_ONE_HOST = "a replica runs on one host; remove it"
_REPLICAS = "write {path}.replicas instead (docs/operations.md, Data parallelism)"
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
"""`EngineArgs` fields of vLLM's data parallelism, each with the only accepted value. A stage has replicas instead."""

NOT_SUPPORTED: Mapping[str, tuple[object, str]] = {
    "aggregate_engine_logging": (False, "each replica has a line of its own in the log; remove it"),
    "prefill_context_parallel_size": (1, "write tensor_parallel_size instead"),
}
"""Further `EngineArgs` fields that have no effect here: (the only accepted value, advice for the error text)."""

_RESERVED: Mapping[str, tuple[str, tuple[object, ...]]] = {
    "model": ("the model is given once, on the command line; remove it", (None,)),
    "runner": ("the stages choose their own runner; remove it", ("auto", "generate")),
    "convert": ("the stages choose their own; remove it", ("auto", "none")),
    "device_ids": ("write {path}.devices instead", (None,)),
    **{name: (_REPLICAS, (harmless,)) for name, harmless in DATA_PARALLEL.items()},
    **{name: (advice, (harmless,)) for name, (harmless, advice) in NOT_SUPPORTED.items()},
    "enable_fault_tolerance": ("a lost replica is handled by the pool; remove it", (False,)),
    "nnodes": (_ONE_HOST, (1,)),
    "node_rank": (_ONE_HOST, (0,)),
    "_api_process_count": (_API, (1,)),
    "_api_process_rank": (_API, (0,)),
}
"""`EngineArgs` fields that a user may not set: (advice for the error text, accepted values, which have no effect)."""

_INSTEAD: Mapping[str, str] = {"pipeline_parallel_size": "write tensor_parallel_size instead"}
"""Advice for the error text by field, if a user sets a field that the pipeline sets. Other fields: "remove it"."""


def user_engine_args(
    spec: StageSpec, stage: ReplicasConfig, text_args: Mapping[str, Any], takes_stock_flags: bool
) -> dict[str, Any]:
    """Return the engine arguments of a stage that the user has set.

    Stock `vllm serve` flags override those in the stage config file, and `--stage-overrides` override both. Arguments
    that are null then are left out, so that the plan's defaults apply.

    Args:
        stage: the stage's settings.
        text_args: values of stock flags by `EngineArgs` field, only those that the user has set.
        takes_stock_flags: all stock flags apply to the stage; otherwise only those in `SHARED_FIELDS`.

    Raises:
        ConfigError: the user sets a field that the pipeline or the plan sets.
    """
    path = f"{stage_path(spec.name)}.engine"
    flags = {
        key: value
        for key, value in text_args.items()
        # A shared flag does not reach a stage whose pipeline sets the field.
        if key != "model"
        and not (key == HF_OVERRIDES and key in spec.engine)
        and (takes_stock_flags or (key in SHARED_FIELDS and key not in {**spec.engine, **spec.engine_defaults}))
    }
    for layer, prefix in ((flags, ""), (stage.engine, f"{path}."), (stage.engine_overrides, f"{path}.")):
        for key, value in layer.items():
            _check_free(f"{prefix}{key}", key, value, spec)
    of_file = stage.engine.keys() - stage.engine_overrides.keys()
    if stage.kv_cache_bytes is not None and "kv_cache_memory_bytes" in of_file:
        raise ConfigError(
            f"{path}.kv_cache_memory_bytes: {stage_path(spec.name)}.kv_cache_bytes says the same; keep one of the two"
        )
    cache = {} if stage.kv_cache_bytes is None else {"kv_cache_memory_bytes": stage.kv_cache_bytes}
    merged = {**stage.engine, **cache, **flags, **stage.engine_overrides}
    return {name: value for name, value in merged.items() if value is not None}


@dataclass(frozen=True)
class WithOverrides:
    """Value of `hf_overrides` of a stage for which the pipeline sets a function, and the user has set overrides.

    Attributes:
        function: "pkg.mod:attr" of the pipeline's function.
        overrides: the user's value of `hf_overrides`.
    """

    function: str
    overrides: Any

    def __str__(self) -> str:
        """Return the text for a printed plan."""
        return f"{self.function} after {self.overrides}"


def check_policy(spec: StageSpec, args: Mapping[str, Any]) -> None:
    """Raise ConfigError if the scheduling policy in a stage's engine arguments is not `priority`.

    Called if `batch_dir` is set: requests of `/v1/batches` are scheduled after live requests.
    """
    if args["scheduling_policy"] != BY_PRIORITY:
        path = f"{stage_path(spec.name)}.engine.scheduling_policy"
        raise ConfigError(f"{path}: must be {BY_PRIORITY} with batch_dir, got {args['scheduling_policy']!r}; remove it")


def check_events(config: OmniConfig, args: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise ConfigError if several replicas of this host would listen at one address for clients of KV cache events.

    Args:
        args: engine arguments by stage.
    """
    replicas: dict[str, int] = {}
    for name, each in args.items():
        given = each.get(KV_EVENTS) or {}
        events = given if isinstance(given, Mapping) else vars(given)  # a config object of vLLM, from its command line
        if not events.get("enable_kv_cache_events") or events.get("publisher") == "null":
            continue
        endpoint = events.get("endpoint") or EVENTS_ENDPOINT
        replicas[endpoint] = replicas.get(endpoint, 0) + config.stage(name).replicas
        if replicas[endpoint] > 1:
            raise ConfigError(
                f"{stage_path(name)}.engine.{KV_EVENTS}: {replicas[endpoint]} replicas of this host would publish at "
                f"{endpoint}, and only one can; start one, or give each stage another endpoint"
            )


def parallel_size(path: str, field: str, args: Mapping[str, Any]) -> int:
    """Return the engine argument `field`, `tensor_parallel_size` or `pipeline_parallel_size`; 1 if it is not set.

    Args:
        path: path of the stage in the configuration, for the error.

    Raises:
        ConfigError: the value is not an integer >= 1.
    """
    value = args.get(field, 1)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{path}.engine.{field}: must be an integer >= 1, got {value!r}")
    return value


def _check_free(where: str, key: str, value: Any, spec: StageSpec) -> None:
    if key in spec.engine and value != spec.engine[key]:
        advice = _INSTEAD.get(key, "remove it")
        raise ConfigError(f"{where}: the pipeline sets it to {spec.engine[key]!r} for '{spec.name}'; {advice}")
    if key in _RESERVED and key not in spec.engine:
        advice, harmless = _RESERVED[key]
        if value not in harmless:
            raise ConfigError(f"{where}: {advice.format(path=stage_path(spec.name))}")


def with_custom_ops(args: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return engine arguments whose `compilation_config` also enables vLLM's own kernels of these operators.

    Args:
        args: `EngineArgs` fields; operators that they enable or disable by name stay as they are.
        names: names of the operators, as registered in vLLM.
    """
    chosen = args.get(COMPILATION)
    config = {"mode": chosen} if isinstance(chosen, int) else copy.copy(chosen) if chosen else {}
    given = list(config.get("custom_ops") or () if isinstance(config, dict) else config.custom_ops)
    missing = [f"+{name}" for name in names if not {f"+{name}", f"-{name}"} & {*given}]
    if not missing:
        return dict(args)
    if isinstance(config, dict):
        config["custom_ops"] = given + missing
    else:  # a config object of vLLM, from its command line
        config.custom_ops = given + missing
    return {**args, COMPILATION: config}


def connections(pipeline: PipelineSpec, config: OmniConfig) -> dict[str, dict[str, Any]]:
    """Return the connector settings of the edges over which a pipeline's stages send tensors, by the name of the edge.

    Raises:
        ConfigError: an edge is unknown, or a setting is wrong; the message starts with the path.
    """
    names = list(dict.fromkeys(edge.name for edge in pipeline.edges if edge.kind == "tensors" and edge.name))
    for name in config.connectors:
        if name not in names:
            raise unknown_key("connectors", name, names)
    spread = config.cluster.master_address is not None
    return {n: connector_settings(f"connectors.{n}", config.connectors.get(n, {}), spread=spread) for n in names}


def connector_config(pipeline: PipelineSpec, stage: StageSpec, connected: Connections) -> dict[str, Any]:
    """Return the connector settings that a stage's engines get in vLLM's `additional_config`.

    Both sides of a split stage send tensors, each those of the positions that it computes; decode replicas also compute
    prompts while there is no prefill replica.

    Args:
        connected: result of `connections`.

    Returns:
        Settings by the name of the edge, under `OUTGOING` for edges that begin at the stage, and under `INCOMING` for
        edges that end there. A key without edges is missing.
    """
    edges = [edge for edge in pipeline.edges if edge.name in connected]
    whole = {spec.name: spec.model_stage for spec in pipeline.stages}
    sends = {edge.name: dict(connected[edge.name]) for edge in edges if whole[edge.source] == stage.model_stage}
    takes = {edge.name: dict(connected[edge.name]) for edge in edges if edge.target == stage.name}
    return {key: found for key, found in ((OUTGOING, sends), (INCOMING, takes)) if found}
