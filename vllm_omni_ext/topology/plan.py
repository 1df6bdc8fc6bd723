"""From model, pipeline, configuration and machine to a plan. Pure: the same input gives the same plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm_omni_ext.config.checks import ADAPTIVE, ALL_AT_ONCE, unknown_key
from vllm_omni_ext.config.disaggregation import stage_path
from vllm_omni_ext.config.schema import MAX_MEDIA_TOKENS, STREAM_IDLE_TIMEOUT_S, OmniConfig
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.plugins.memory import ModelFacts
from vllm_omni_ext.plugins.spec import PipelineSpec, StageSpec
from vllm_omni_ext.topology import cpu
from vllm_omni_ext.topology.budget import Ask, DoesNotFit, Sheet, divide
from vllm_omni_ext.topology.compilation import with_custom_ops
from vllm_omni_ext.topology.connections import Connections, connections, connector_config
from vllm_omni_ext.topology.disaggregation import check_pairs, expand
from vllm_omni_ext.topology.layers import SHARED_FIELDS, parallel_size, user_engine_args
from vllm_omni_ext.topology.needs import GIB, need
from vllm_omni_ext.topology.placement import Demand, Devices, memory_shares, place
from vllm_omni_ext.topology.remedies import MEDIA_FLAG, advice
from vllm_omni_ext.topology.shape import Machine, Plan, ReplicaPlan, StagePlan

__all__ = [
    "SHARED_FIELDS",
    "Machine",
    "Plan",
    "ReplicaPlan",
    "StagePlan",
    "make_plan",
    "plan_as_asked",
    "resolved_params",
]


def make_plan(
    *,
    model: str,
    pipeline: PipelineSpec,
    config: OmniConfig,
    text_args: Mapping[str, Any],
    machine: Machine,
    facts: ModelFacts | None = None,
    family: str = "",
) -> Plan:
    """Determine the processes to start, and their settings.

    Args:
        text_args: the `EngineArgs` fields that the user gave as stock flags or keywords. They apply to the frontend;
            those in `SHARED_FIELDS` to every stage.
        facts: facts of the checkpoint about its stages, if known.
        family: name of the model family that the pipeline is from.

    Raises:
        DoesNotFit: a CUDA device is too small; the message contains the needs and the flags that help.
        ConfigError: the settings contradict each other, the pipeline or the machine.
    """
    facts = facts or ModelFacts()

    def attempt(flags: Mapping[str, Any], where: Machine) -> Plan:
        return plan_as_asked(
            model=model,
            pipeline=pipeline,
            config=config,
            text_args={**text_args, **flags},
            machine=where,
            facts=facts,
            family=family,
        )

    try:
        return attempt({}, machine)
    except DoesNotFit as err:
        said = text_args.get("max_model_len")
        longest = said if isinstance(said, int) else facts.max_model_len.get(pipeline.frontend, 0)
        helps = advice(attempt, text_args, machine, longest)
        raise DoesNotFit(f"{err}; {helps}", err.sheets) from None


def plan_as_asked(
    *,
    model: str,
    pipeline: PipelineSpec,
    config: OmniConfig,
    text_args: Mapping[str, Any],
    machine: Machine,
    facts: ModelFacts,
    family: str = "",
) -> Plan:
    """As `make_plan`, without a search for flags that help when a device is too small.

    Args:
        text_args: may also have `MEDIA_FLAG`, which is not stock: a remedy sets it.
    """
    if MEDIA_FLAG in text_args:
        config = replace(config, max_media_tokens=text_args[MEDIA_FLAG])
        text_args = {name: value for name, value in text_args.items() if name != MEDIA_FLAG}
    pipeline, config = expand(pipeline, config)
    if config.pipeline not in (None, pipeline.name):
        raise ConfigError(f"pipeline: the stage config is for '{config.pipeline}', but the model is '{pipeline.name}'")
    for name in config.stages:
        pipeline.stage(name)
    _check_chunks(pipeline, config)
    _check_min_replicas(config)
    user = {
        spec.name: user_engine_args(spec, config.stage(spec.name), text_args, pipeline.takes_stock_flags(spec))
        for spec in pipeline.stages
    }
    connected = connections(pipeline, config)
    around = _Surroundings(pipeline, config, machine, facts, _replica_count(pipeline, config), connected)
    args = {spec.name: _engine_args(spec, user[spec.name], around) for spec in pipeline.stages}
    devices, utilizations, sheets = _devices(args, user, around)
    for name, value in utilizations.items():
        args[name].setdefault("gpu_memory_utilization", value)
    for name, value in _encoder_caches(sheets).items():
        args[name].setdefault("kv_cache_memory_bytes", value)
    stages = tuple(_stage_plan(spec, args[spec.name], devices[spec.name], around) for spec in pipeline.stages)
    check_pairs(pipeline.edges, {stage.name: stage.engine_args for stage in stages}, config)
    return Plan(
        model=model,
        family=family,
        pipeline=pipeline.name,
        frontend_stage=pipeline.frontend,
        machine=machine,
        stages=stages,
        edges=pipeline.edges,
        api_servers=_api_servers(config, machine),
        chunks=_chunks(pipeline, config),
        connectors=connected,
        config=config,
        sheets=sheets,
    )


CORES_PER_API_SERVER, MOST_API_SERVERS = 2, 8
"""`auto`: one API server for every two cores, since its engines need cores too, up to a bound for large hosts."""


def _api_servers(config: OmniConfig, machine: Machine) -> int:
    if isinstance(config.api_servers, int):
        return config.api_servers
    return max(1, min(machine.cpu_count // CORES_PER_API_SERVER, MOST_API_SERVERS))


def _check_chunks(pipeline: PipelineSpec, config: OmniConfig) -> None:
    known = [*pipeline.chunks(), ADAPTIVE]
    for name in config.chunks:
        if name not in known:
            raise unknown_key("chunks", name, known)
    if config.stream_idle_timeout_s <= config.chunk_timeout_s:
        raise ConfigError(
            f"{STREAM_IDLE_TIMEOUT_S}: must be more than chunk_timeout_s ({config.chunk_timeout_s:g}), "
            f"got {config.stream_idle_timeout_s:g}"
        )


def _check_min_replicas(config: OmniConfig) -> None:
    if config.master_address is not None or config.master_port is not None:
        return  # others may join
    for name, stage in config.stages.items():
        if stage.min_replicas > max(stage.replicas, 1):
            raise ConfigError(
                f"{stage_path(name)}.min_replicas: {stage.min_replicas} can never be up, because {stage.replicas} are "
                "started here and none can join; set a master_address, or start as many here"
            )


def _chunks(pipeline: PipelineSpec, config: OmniConfig) -> dict[str, Any]:
    """Chunk sizes by edge, and whether they adapt."""
    sizes: dict[str, Any] = {**pipeline.chunks(), ADAPTIVE: True, **config.chunks}
    return sizes if config.async_chunk else sizes | dict.fromkeys(pipeline.chunks(), ALL_AT_ONCE)


def resolved_params(pipeline: PipelineSpec, config: OmniConfig) -> dict[str, dict[str, Any]]:
    """Default parameters by stage: the configuration's over the pipeline's."""
    return {spec.name: {**spec.defaults, **config.stage(spec.name).params} for spec in pipeline.stages}


@dataclass(frozen=True)
class _Surroundings:
    """Values that are the same for all stages; `replicas` is the number of all replicas on this host, at least 1."""

    pipeline: PipelineSpec
    config: OmniConfig
    machine: Machine
    facts: ModelFacts
    replicas: int
    connected: Connections


def _replica_count(pipeline: PipelineSpec, config: OmniConfig) -> int:
    return max(1, sum(config.stage(spec.name).replicas for spec in pipeline.stages))


_Placement = tuple[dict[str, tuple[Devices, ...]], dict[str, float], tuple[Sheet, ...]]


def _devices(args: Mapping[str, dict[str, Any]], user: Mapping[str, Mapping[str, Any]], a: _Surroundings) -> _Placement:
    """Devices of all replicas, the `gpu_memory_utilization` of stages that need one, and the devices' sheets."""
    if a.machine.platform == "cpu":
        for spec in a.pipeline.stages:
            if a.config.stage(spec.name).replicas:
                cpu.check_devices(spec.name, a.config.stage(spec.name))
        cpu.check_engines(
            user, {spec.name: a.config.stage(spec.name).replicas for spec in a.pipeline.stages}, a.machine
        )
        return {spec.name: ((),) * a.config.stage(spec.name).replicas for spec in a.pipeline.stages}, {}, ()
    demands = [_demand(spec, a.config, user[spec.name]) for spec in a.pipeline.stages]
    asks = _asks(args, a)
    if not asks:
        placed = place(demands, a.machine.device_count)
        return placed, memory_shares(demands, placed), ()
    sizes = {stage: ask.need.fixed + ask.kv for stage, ask in asks.items()}
    placed = place([replace(demand, share=sizes[demand.stage] / GIB) for demand in demands], a.machine.device_count)
    utilizations, sheets = divide(list(asks.values()), placed, a.machine.device_bytes)
    return placed, utilizations, sheets


def _encoder_caches(sheets: Sequence[Sheet]) -> dict[str, int]:
    """Bytes of the KV cache of each stage with an encoder.

    vLLM profiles the encoder with a smaller video than a request may have, and gives the difference to the KV cache.
    Without room for one sequence the size stays vLLM's: the user has set a share that the encoder's peak exceeds.
    """
    found: dict[str, int] = {}
    for sheet in sheets:
        for share in sheet.shares:
            stage = ReplicaId.parse(share.replica).stage
            if share.need.encoder and share.kv_bytes >= share.need.least_kv:
                found[stage] = min(share.kv_bytes, found.get(stage, share.kv_bytes))
    return found


def _asks(args: Mapping[str, dict[str, Any]], a: _Surroundings) -> dict[str, Ask]:
    """Memory needs of each stage; empty unless the sizes of all stages and of the devices are known."""
    memory, lengths = a.facts.memory, a.facts.max_model_len
    if not a.machine.device_bytes or any(spec.model_stage not in memory for spec in a.pipeline.stages):
        return {}
    return {
        spec.name: Ask(
            stage=spec.name,
            need=need(
                memory[spec.model_stage],
                args[spec.name],
                lengths.get(spec.model_stage, 0),
                a.config.max_media_tokens if a.pipeline.takes_stock_flags(spec) else None,
            ),
            utilization=args[spec.name].get("gpu_memory_utilization"),
            kv_bytes=args[spec.name].get("kv_cache_memory_bytes"),
        )
        for spec in a.pipeline.stages
    }


def _demand(spec: StageSpec, config: OmniConfig, user: Mapping[str, Any]) -> Demand:
    stage, path = config.stage(spec.name), stage_path(spec.name)
    return Demand(
        stage=spec.name,
        replicas=stage.replicas,
        tensor_parallel=parallel_size(path, "tensor_parallel_size", user),
        pipeline_parallel=parallel_size(path, "pipeline_parallel_size", user),
        devices=stage.devices,
        share=spec.gpu_share,
        utilization=user.get("gpu_memory_utilization"),
    )


def _engine_args(spec: StageSpec, user: Mapping[str, Any], around: _Surroundings) -> dict[str, Any]:
    """Engine arguments of a stage, without its part of a device's memory."""
    defaults = dict(spec.cuda_defaults)
    if around.machine.platform == "cpu":
        defaults = cpu.engine_defaults(spec, around.facts, around.machine, around.replicas)
        if user.get("tensor_parallel_size", 1) == user.get("pipeline_parallel_size", 1) == 1:
            defaults["distributed_executor_backend"] = "uni"
    args = with_custom_ops({**defaults, **spec.engine_defaults, **user, **spec.engine}, spec.custom_ops)
    more = connector_config(around.pipeline, spec, around.connected) or {}
    if around.config.max_media_tokens is not None and around.pipeline.takes_stock_flags(spec):
        more = {**more, MAX_MEDIA_TOKENS: around.config.max_media_tokens}
    if more:
        given = args.get("additional_config", {})
        if not isinstance(given, Mapping):
            raise ConfigError(f"{stage_path(spec.name)}.engine.additional_config: must be a mapping, got {given!r}")
        args["additional_config"] = {**given, **more}
    return _one_step(spec, args, around)


def _stage_plan(
    spec: StageSpec, args: Mapping[str, Any], devices: tuple[Devices, ...], around: _Surroundings
) -> StagePlan:
    stage, on_cpu = around.config.stage(spec.name), around.machine.platform == "cpu"
    env = cpu.environment(stage, around.machine, around.replicas) if on_cpu else {}
    return StagePlan(
        name=spec.name,
        part_of=spec.part_of,
        engine_args=args,
        env={**env, **stage.env},
        replicas=tuple(ReplicaPlan(id=ReplicaId(spec.name, i), devices=ids) for i, ids in enumerate(devices)),
        params={**spec.defaults, **stage.params},
        params_type=spec.params,
        accepts=spec.accepts,
    )


def _one_step(spec: StageSpec, args: dict[str, Any], around: _Surroundings) -> dict[str, Any]:
    """A stage that accepts parts computes each in one step, so a step must hold the longest. It also keeps streams."""
    if spec.accepts != "parts":
        return args
    lengths = around.facts.max_model_len
    if spec.model_stage in lengths:
        args.setdefault("max_model_len", lengths[spec.model_stage])
    args["additional_config"] = {
        STREAM_IDLE_TIMEOUT_S: around.config.stream_idle_timeout_s,
        **args.get("additional_config", {}),
    }
    if "max_model_len" in args:
        args.setdefault("max_num_batched_tokens", args["max_model_len"])
    return args
