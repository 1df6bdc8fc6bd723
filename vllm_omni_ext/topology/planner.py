"""Makes a plan from model, pipeline, configuration and machine. Pure: the same input gives the same plan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from vllm_omni_ext.config.checks import ADAPTIVE, ALL_AT_ONCE, unknown_key
from vllm_omni_ext.config.disaggregation import stage_path
from vllm_omni_ext.config.overrides import with_settings
from vllm_omni_ext.config.schema import MAX_MEDIA_TOKENS, STREAM_IDLE_TIMEOUT_S, OmniConfig
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.plugins.memory import ModelFacts, StageFacts
from vllm_omni_ext.plugins.spec import PipelineSpec, StageSpec
from vllm_omni_ext.topology.disaggregation import check_pairs, expand
from vllm_omni_ext.topology.engine_args import (
    BY_PRIORITY,
    HF_OVERRIDES,
    WithOverrides,
    check_events,
    check_policy,
    connections,
    connector_config,
    parallel_size,
    user_engine_args,
    with_custom_ops,
)
from vllm_omni_ext.topology.machine import Machine, check_cpu, cpu_defaults, cpu_environment
from vllm_omni_ext.topology.memory import NOMINAL_DEVICE, Demand, DoesNotFit, Sheet, divide, need, nominal_need
from vllm_omni_ext.topology.placement import Devices, place
from vllm_omni_ext.topology.plan import Plan, ReplicaPlan, StagePlan
from vllm_omni_ext.topology.remedies import MEDIA_FLAG, advice

STAGE_WORKER = "vllm_omni_ext.engine.worker.StageWorker"
"""`worker_cls` of a stage for which neither the plugin nor the user sets one. It is vLLM's worker, but a seeded request
that is moved from a lost replica continues with the same random numbers."""

PARALLEL_SIZES = ("tensor_parallel_size", "pipeline_parallel_size")

MOST_REPLICAS = 1024
"""Largest number of replicas of a stage that a host starts."""

CORES_PER_API_SERVER, MOST_API_SERVERS = 2, 8
"""`api_servers: auto` makes one API server for every 2 cores, because engines need cores too, and at most 8."""


def make_plan(
    *,
    model: str,
    pipeline: PipelineSpec,
    config: OmniConfig,
    text_args: Mapping[str, Any],
    machine: Machine,
    facts: ModelFacts | None = None,
    family: str = "",
    remedies: bool = True,
) -> Plan:
    """Return the plan: the processes to start, and their settings.

    Args:
        pipeline: the stages to run, and the edges between them, declared by the model plugin.
        text_args: the `EngineArgs` fields that the user has set as `vllm serve` flags or keywords. They apply to the
            frontend (the stage whose tokenizer the server uses); those in `SHARED_FIELDS` apply to every stage. The
            mapping may also contain `MEDIA_FLAG`, which is not a flag of vLLM.
        facts: sizes of the checkpoint's stages, if known.
        family: name of the model family that the pipeline is from.
        remedies: search for flags with which the model fits, if a device is too small.

    Raises:
        DoesNotFit: a CUDA device is too small; the message contains the memory that each replica needs, and the flags
            with which the model fits.
        ConfigError: the settings contradict each other, the pipeline or the machine.
    """
    facts = facts or {}

    def attempt(flags: Mapping[str, Any], where: Machine) -> Plan:
        args, changed = {**text_args, **flags}, config
        if MEDIA_FLAG in args:
            changed = with_settings(config, {"max_media_tokens": args.pop(MEDIA_FLAG)})
        return _Planner(*expand(pipeline, changed), args, where, facts).plan(model, family)

    try:
        return attempt({}, machine)
    except DoesNotFit as err:
        if not remedies:
            raise
        given = text_args.get("max_model_len")
        stage = pipeline.stage(pipeline.frontend).model_stage
        longest = given if isinstance(given, int) else facts.get(stage, StageFacts()).max_model_len
        helps = advice(attempt, text_args, machine, longest)
        raise DoesNotFit(f"{err}; {helps}", err.sheets) from None


def resolved_params(pipeline: PipelineSpec, config: OmniConfig) -> dict[str, dict[str, Any]]:
    """Return the default parameters of requests by stage: those of the configuration override those of the pipeline."""
    return {spec.name: {**spec.defaults, **config.stage(spec.name).params} for spec in pipeline.stages}


class _Planner:
    """Computes one plan: devices and memory of each replica.

    Attributes:
        user: engine arguments that the user has set, by stage.
        args: all engine arguments, by stage.
        hf_overrides: the user's overrides of the checkpoint's config, for all stages.
        processes: number of processes on this host that compute, by stage: one for each rank of each replica.
    """

    def __init__(
        self,
        pipeline: PipelineSpec,
        config: OmniConfig,
        text_args: Mapping[str, Any],
        machine: Machine,
        facts: ModelFacts,
    ) -> None:
        self.pipeline, self.config, self.machine = pipeline, config, machine
        self.facts = {spec.name: facts.get(spec.model_stage, StageFacts()) for spec in pipeline.stages}
        _check(pipeline, config)
        self.user = {
            spec.name: user_engine_args(spec, config.stage(spec.name), text_args, pipeline.takes_stock_flags(spec))
            for spec in pipeline.stages
        }
        self.hf_overrides = text_args.get(HF_OVERRIDES)
        self.connectors = connections(pipeline, config)
        self.processes = {name: config.stage(name).replicas * _ranks(name, args) for name, args in self.user.items()}
        self.args = {spec.name: self._engine_args(spec) for spec in pipeline.stages}

    def plan(self, model: str, family: str) -> Plan:
        devices, sheets = self._devices()
        stages = tuple(self._stage(spec, devices[spec.name]) for spec in self.pipeline.stages)
        check_pairs(self.pipeline.edges, self.args, self.config)
        check_events(self.config, self.args)
        automatic = max(1, min(self.machine.cpu_count // CORES_PER_API_SERVER, MOST_API_SERVERS))
        chunks = {**self.pipeline.chunks(), ADAPTIVE: True, **self.config.chunks}
        if not self.config.async_chunk:
            chunks |= dict.fromkeys(self.pipeline.chunks(), ALL_AT_ONCE)
        return Plan(
            model=model,
            family=family,
            pipeline=self.pipeline.name,
            frontend_stage=self.pipeline.frontend,
            machine=self.machine,
            stages=stages,
            edges=self.pipeline.edges,
            api_servers=self.config.api_servers if isinstance(self.config.api_servers, int) else automatic,
            chunks=chunks,
            connectors=self.connectors,
            config=self.config,
            sheets=sheets,
        )

    def _engine_args(self, spec: StageSpec) -> dict[str, Any]:
        """Return the engine arguments of a stage; `_devices` adds those for the share of a device's memory later."""
        user, facts, is_frontend = self.user[spec.name], self.facts[spec.name], self.pipeline.takes_stock_flags(spec)
        defaults = dict(spec.cuda_defaults)
        if self.machine.platform == "cpu":
            parallel = {field: user[field] for field in PARALLEL_SIZES if field in user}
            defaults = cpu_defaults(spec, facts, self.machine, self._all_processes(), parallel)
            if _ranks(spec.name, user) == 1:
                defaults["distributed_executor_backend"] = "uni"
        if self.config.batch_dir is not None:
            defaults["scheduling_policy"] = BY_PRIORITY
        defaults = {"worker_cls": STAGE_WORKER, **defaults, **spec.engine_defaults}
        args = with_custom_ops({**defaults, **user, **spec.engine}, spec.custom_ops)
        if self.hf_overrides and HF_OVERRIDES in spec.engine:
            args[HF_OVERRIDES] = WithOverrides(spec.engine[HF_OVERRIDES], self.hf_overrides)
        if self.config.batch_dir is not None:
            check_policy(spec, args)
        more = connector_config(self.pipeline, spec, self.connectors)
        if self.config.limits.max_media_tokens is not None and is_frontend:
            more[MAX_MEDIA_TOKENS] = self.config.limits.max_media_tokens
        given = args.get("additional_config", {})
        if not isinstance(given, Mapping):
            raise ConfigError(f"{stage_path(spec.name)}.engine.additional_config: must be a mapping, got {given!r}")
        if spec.accepts == "parts":
            given = {STREAM_IDLE_TIMEOUT_S: self.config.timeouts.stream_idle_timeout_s, **given}
            # Each part is computed in one step, so a step must have room for the longest part.
            if facts.max_model_len:
                args.setdefault("max_model_len", facts.max_model_len)
            if "max_model_len" in args:
                args.setdefault("max_num_batched_tokens", args["max_model_len"])
        if more or given:
            args["additional_config"] = {**given, **more}
        return args

    def _devices(self) -> tuple[dict[str, tuple[Devices, ...]], tuple[Sheet, ...]]:
        """Choose the devices of all replicas, and set the engine arguments for their memory.

        Returns:
            The devices of each replica by stage, and the memory of each device. On a CPU machine and for unknown sizes,
            the latter is empty.
        """
        if self.machine.platform == "cpu":
            check_cpu(self.pipeline.stages, self.config, self.user, self.machine, self.processes)
            return {spec.name: ((),) * self.config.stage(spec.name).replicas for spec in self.pipeline.stages}, ()
        for spec in self.pipeline.stages:
            stage = self.config.stage(spec.name)
            if stage.replicas and stage.cpu_threads is not None:
                raise ConfigError(
                    f"{stage_path(spec.name)}.cpu_threads: replicas of this machine compute on CUDA devices; remove it"
                )
        sizes = self.machine.device_bytes if all(stage.weights for stage in self.facts.values()) else ()
        demands = [self._demand(spec, known=bool(sizes)) for spec in self.pipeline.stages]
        placed = place(demands, self.machine.device_count, sizes)
        utilizations, sheets = divide(demands, placed, sizes or (NOMINAL_DEVICE,) * self.machine.device_count)
        for name, value in utilizations.items():
            self.args[name].setdefault("gpu_memory_utilization", value)
        if not sizes:
            return placed, ()
        for name, size in _encoder_caches(sheets).items():
            self.args[name].setdefault("kv_cache_memory_bytes", size)
        return placed, sheets

    def _demand(self, spec: StageSpec, *, known: bool) -> Demand:
        """Return the devices and memory that a stage needs.

        Args:
            known: the sizes of stages and devices are known; otherwise `StageSpec.gpu_share` is used.
        """
        stage, args = self.config.stage(spec.name), self.args[spec.name]
        media = self.config.limits.max_media_tokens if self.pipeline.takes_stock_flags(spec) else None
        path = stage_path(spec.name)
        return Demand(
            stage=spec.name,
            replicas=stage.replicas,
            tensor_parallel=parallel_size(path, "tensor_parallel_size", args),
            pipeline_parallel=parallel_size(path, "pipeline_parallel_size", args),
            devices=stage.devices,
            need=need(self.facts[spec.name], args, media) if known else nominal_need(spec.gpu_share),
            utilization=args.get("gpu_memory_utilization"),
            kv_bytes=args.get("kv_cache_memory_bytes") if known else None,
        )

    def _all_processes(self) -> int:
        return max(1, sum(self.processes.values()))

    def _stage(self, spec: StageSpec, devices: tuple[Devices, ...]) -> StagePlan:
        stage = self.config.stage(spec.name)
        env = stage.env
        if self.machine.platform == "cpu":
            env = cpu_environment(stage_path(spec.name), stage, self.machine, self._all_processes())
        return StagePlan(
            name=spec.name,
            part_of=spec.part_of,
            engine_args=self.args[spec.name],
            env=env,
            replicas=tuple(ReplicaPlan(id=ReplicaId(spec.name, i), devices=ids) for i, ids in enumerate(devices)),
            params={**spec.defaults, **stage.params},
            params_type=spec.params,
            accepts=spec.accepts,
        )


def _ranks(stage: str, args: Mapping[str, Any]) -> int:
    """Return the number of processes of a replica that compute, one for each device on a CUDA machine."""
    return math.prod(parallel_size(stage_path(stage), field, args) for field in PARALLEL_SIZES)


def _encoder_caches(sheets: tuple[Sheet, ...]) -> dict[str, int]:
    """Return `kv_cache_memory_bytes` for each stage with an encoder, by stage.

    Without this argument, vLLM profiles the encoder with a smaller video than a request may have, and gives the
    difference to the KV cache. A KV cache without room for one sequence is left out, so that vLLM determines its size:
    the user has set a `gpu_memory_utilization` that the encoder's peak exceeds.
    """
    found: dict[str, int] = {}
    for share in (share for sheet in sheets for share in sheet.shares):
        stage = ReplicaId.parse(share.replica).stage
        if share.need.encodes and share.kv_bytes >= share.need.least_kv:
            found[stage] = min(share.kv_bytes, found.get(stage, share.kv_bytes))
    return found


def _check(pipeline: PipelineSpec, config: OmniConfig) -> None:
    """Raise ConfigError if the configuration is for another pipeline, or its settings contradict each other."""
    if config.pipeline not in (None, pipeline.name):
        raise ConfigError(f"pipeline: the stage config is for '{config.pipeline}', but the model is '{pipeline.name}'")
    for name, stage in config.stages.items():
        pipeline.stage(name)
        if stage.replicas > MOST_REPLICAS:
            raise ConfigError(f"{stage_path(name)}.replicas: must be <= {MOST_REPLICAS}, got {stage.replicas}")
    known = [*pipeline.chunks(), ADAPTIVE]
    for name in config.chunks:
        if name not in known:
            raise unknown_key("chunks", name, known)
    if config.cluster.master_address is not None or config.cluster.master_port is not None:
        return  # further replicas may join
    for name, stage in config.stages.items():
        if stage.min_replicas > max(stage.replicas, 1):
            raise ConfigError(
                f"{stage_path(name)}.min_replicas: {stage.min_replicas} can never be up, because {stage.replicas} are "
                "started here and none can join; set cluster.master_address, or start as many here"
            )
