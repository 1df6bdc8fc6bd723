"""The connector of each tensor edge, and the connector settings of the engines at its ends. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_omni_ext.config.checks import unknown_key
from vllm_omni_ext.config.connectors import connector_settings
from vllm_omni_ext.config.schema import INCOMING, OUTGOING, OmniConfig
from vllm_omni_ext.plugins.spec import PipelineSpec, StageSpec

Connections = Mapping[str, Mapping[str, Any]]
"""Fields of `ConnectorConfig` by the name of the edge."""


def connections(pipeline: PipelineSpec, config: OmniConfig) -> dict[str, dict[str, Any]]:
    """The connectors of a pipeline's edges.

    Raises:
        ConfigError: settings of an unknown edge, or wrong ones; the message starts with their path.
    """
    names = [edge.name for edge in pipeline.edges if edge.kind == "tensors" and edge.name]
    for name in config.connectors:
        if name not in names:
            raise unknown_key("connectors", name, names)
    spread = config.master_address is not None
    return {n: connector_settings(f"connectors.{n}", config.connectors.get(n, {}), spread=spread) for n in names}


def connector_config(pipeline: PipelineSpec, stage: StageSpec, connected: Connections) -> dict[str, Any]:
    """A stage's connectors for vLLM's `additional_config`; empty if no tensor edge begins or ends at the stage.

    Both sides of a split stage send: decode replicas also prefill while there is no prefill replica.
    """
    edges = [edge for edge in pipeline.edges if edge.name in connected]
    whole = {spec.name: spec.model_stage for spec in pipeline.stages}
    sends = {edge.name: dict(connected[edge.name]) for edge in edges if whole[edge.source] == stage.model_stage}
    takes = {edge.name: dict(connected[edge.name]) for edge in edges if edge.target == stage.name}
    return {key: found for key, found in ((OUTGOING, sends), (INCOMING, takes)) if found}
