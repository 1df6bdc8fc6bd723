"""Which connector each hand-over of tensors has, and what the engines at its ends are told of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_omni_ext.config.checks import unknown_key
from vllm_omni_ext.config.connectors import connector_settings
from vllm_omni_ext.config.schema import SENDS, TAKES, OmniConfig
from vllm_omni_ext.model_plugins.registry import PipelineSpec, StageSpec

Connections = Mapping[str, Mapping[str, Any]]
"""Fields of `ConnectorConfig` by the name of the hand-over."""


def connections(pipeline: PipelineSpec, config: OmniConfig) -> dict[str, dict[str, Any]]:
    """The connectors of a pipeline's hand-overs.

    Raises:
        ConfigError: settings of a hand-over that has none, or wrong ones; names the place.
    """
    names = [edge.name for edge in pipeline.edges if edge.kind == "tensors" and edge.name]
    for name in config.connectors:
        if name not in names:
            raise unknown_key("connectors", name, names)
    spread = config.master_address is not None
    return {n: connector_settings(f"connectors.{n}", config.connectors.get(n, {}), spread=spread) for n in names}


def told(pipeline: PipelineSpec, stage: StageSpec, connected: Connections) -> dict[str, Any]:
    """What goes into vLLM's `additional_config` of a stage; empty if no such hand-over begins or ends there.

    Both sides of a split stage send: the one that answers does both while nobody computes its prompts.
    """
    edges = [edge for edge in pipeline.edges if edge.name in connected]
    whole = {spec.name: spec.model_stage for spec in pipeline.stages}
    sends = {edge.name: dict(connected[edge.name]) for edge in edges if whole[edge.source] == stage.model_stage}
    takes = {edge.name: dict(connected[edge.name]) for edge in edges if edge.target == stage.name}
    return {key: found for key, found in ((SENDS, sends), (TAKES, takes)) if found}
