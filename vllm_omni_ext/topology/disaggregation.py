"""Splits each stage with `prefill_decode` into a prefill stage and a decode stage. Pure.

The KV caches of prompts are sent from the prefill stage to the decode stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from vllm_omni_ext.config.disaggregation import (
    OF_A_SIDE,
    PREFILL_DECODE,
    refuse_keys_of_split_stage,
    side_name,
    split_name,
    stage_path,
)
from vllm_omni_ext.config.schema import OmniConfig, PrefillDecode, ReplicasConfig, StageConfig
from vllm_omni_ext.disaggregation import parameters
from vllm_omni_ext.disaggregation.parameters import TransferSettings
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.ids import DECODE, PREFILL, SIDES
from vllm_omni_ext.plugins.spec import KV, EdgeSpec, PipelineSpec, StageSpec


def expand(pipeline: PipelineSpec, config: OmniConfig) -> tuple[PipelineSpec, OmniConfig]:
    """Split every stage that has `prefill_decode` and is not split yet.

    Returns:
        The pipeline with the stages `X.prefill` and `X.decode`, in this order, in place of each split stage X, and the
        configuration with settings for both stages and none for X. If there is no stage to split, both are returned
        unchanged.

    Raises:
        ConfigError: a stage cannot be split, or its settings contradict each other.
    """
    for name, stage in config.stages.items():
        if stage.prefill_decode is not None and split_name(name) is None:
            spec = pipeline.stage(name)
            _check(spec, stage, stage.prefill_decode, pipeline)
            pipeline = _split_pipeline(pipeline, spec, transfer_settings(stage.prefill_decode))
            config = _split_config(config, name, stage, stage.prefill_decode)
    return pipeline, config


def transfer_settings(split: PrefillDecode) -> TransferSettings:
    """Return the settings of the KV connector for both sides. Null keys have the defaults of `TransferSettings`."""
    given = {f.name: getattr(split, f.name) for f in fields(TransferSettings)}
    return TransferSettings(**{name: value for name, value in given.items() if value is not None})


def check_pairs(edges: tuple[EdgeSpec, ...], engine_args: Mapping[str, Mapping[str, Any]], config: OmniConfig) -> None:
    """Check that the decode stage of each split stage can use the KV caches of the prefill stage.

    Args:
        edges: edges of the pipeline; those of kind "kv" lead from a prefill to a decode stage.
        engine_args: `EngineArgs` fields by stage.

    Raises:
        ConfigError: engine arguments of the two stages differ; the message starts with the path of the decode stage's
            argument.
    """
    for edge in edges:
        split = config.stage(edge.target).prefill_decode
        if edge.kind == KV and split is not None:
            try:
                parameters.check_pair(engine_args[edge.source], engine_args[edge.target])
            except ValueError as err:
                raise ConfigError(f"{stage_path(edge.target)}.engine.{err}") from err


def _path(stage: str) -> str:
    return f"stages.{stage}.{PREFILL_DECODE}"


def _check(spec: StageSpec, stage: StageConfig, split: PrefillDecode, pipeline: PipelineSpec) -> None:
    if not spec.splittable:
        why = "is not declared splittable by its family (docs/prefill-decode.md)"
        if spec.accepts == "chunks":
            why = "takes its input while it decodes, so its prompts cannot be computed elsewhere"
        if spec.accepts == "parts":
            why = "keeps the state of its streams outside of the KV cache, so its prompts cannot be computed elsewhere"
        able = " and ".join(f"'{each.name}'" for each in pipeline.stages if each.splittable)
        able = f"only {able} can be split" if able else f"no stage of the pipeline '{pipeline.name}' can be split"
        raise ConfigError(f"{_path(spec.name)}: '{spec.name}' {why}; {able}; remove it")
    default = StageConfig()
    given = [key for key in OF_A_SIDE if getattr(stage, key) != getattr(default, key)]
    refuse_keys_of_split_stage(f"stages.{spec.name}", given)
    try:
        parameters.check(transfer_settings(split))
    except ValueError as err:
        raise ConfigError(f"{_path(spec.name)}.{err}") from err


def _split_pipeline(pipeline: PipelineSpec, spec: StageSpec, settings: TransferSettings) -> PipelineSpec:
    sides = tuple(
        replace(
            spec,
            name=side_name(spec.name, side),
            part_of=spec.name,
            engine={**spec.engine, **parameters.engine_fields(side, settings)},
        )
        for side in SIDES
    )
    at = pipeline.stages.index(spec)
    return replace(
        pipeline,
        stages=(*pipeline.stages[:at], *sides, *pipeline.stages[at + 1 :]),
        frontend=side_name(spec.name, DECODE) if pipeline.frontend == spec.name else pipeline.frontend,
        edges=(
            EdgeSpec(side_name(spec.name, PREFILL), side_name(spec.name, DECODE), KV),
            *(each for edge in pipeline.edges for each in _moved(edge, spec.name)),
        ),
    )


def _moved(edge: EdgeSpec, stage: str) -> list[EdgeSpec]:
    """Return an edge with the split stage `stage` replaced by its sides, if the edge begins or ends there.

    Input is sent to the prefill side. Tokens are sent by the decode side. Tensors (e.g. hidden states) are sent by both
    sides, each those of the positions that it computes; see `engine_args.connector_config`.
    """
    sources, target = [edge.source], edge.target
    if edge.source == stage:
        sources = [side_name(stage, side) for side in (SIDES if edge.kind == "tensors" else (DECODE,))]
    if target == stage:
        target = side_name(stage, PREFILL)
    return [replace(edge, source=source, target=target) for source in sources]


def _split_config(config: OmniConfig, name: str, stage: StageConfig, split: PrefillDecode) -> OmniConfig:
    sides = {
        side_name(name, PREFILL): replace(_side(stage, split, split.prefill), params={}, min_replicas=1),
        side_name(name, DECODE): _side(stage, split, split.decode),
    }
    stages: dict[str, StageConfig] = {}
    for each, settings in config.stages.items():
        stages |= sides if each == name else {each: settings}
    return replace(config, stages=stages)


def _side(stage: StageConfig, split: PrefillDecode, side: ReplicasConfig) -> StageConfig:
    """Return the settings of one side of a split stage: the stage's own, overridden by those in `side`."""
    own = {name: getattr(side, name) for name in ("lb_policy", "kv_cache_bytes", "cpu_threads")}
    return replace(
        stage,
        replicas=side.replicas,
        devices=side.devices,
        engine={**stage.engine, **side.engine},
        env={**parameters.environment(transfer_settings(split)), **stage.env, **side.env},
        engine_overrides={**stage.engine_overrides, **side.engine_overrides},
        **{name: value for name, value in own.items() if value is not None},
    )
