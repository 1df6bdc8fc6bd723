"""Plugins and their flows know the stages of the model; the sides of a split stage are one stage to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from vllm_omni_ext.orchestrator.flow import Action, Flow, Produced
from vllm_omni_ext.orchestrator.requests import OmniOptions, RequestPlugin, TextRequest


def in_model_terms(plugin: RequestPlugin, names: Mapping[str, str]) -> RequestPlugin:
    """A plugin that is told the model's name of a stage.

    Args:
        names: the model's name by the plan's, where they differ; without any the plugin itself is returned.
    """
    return cast(RequestPlugin, _Plugin(plugin, names)) if names else plugin


class _Plugin:
    def __init__(self, plugin: RequestPlugin, names: Mapping[str, str]) -> None:
        self._plugin = plugin
        self._names = names

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plugin, name)

    def open(self, request: TextRequest, options: OmniOptions) -> Flow:
        return cast(Flow, _Flow(self._plugin.open(request, options), self._names))

    def decode(self, stage: str, tensor: Any) -> Any:
        return self._plugin.decode(self._names.get(stage, stage), tensor)


class _Flow:
    def __init__(self, flow: Flow, names: Mapping[str, str]) -> None:
        self._flow = flow
        self._names = names

    def __getattr__(self, name: str) -> Any:
        return getattr(self._flow, name)

    def handle(self, event: Produced) -> list[Action]:
        name = self._names.get(event.stage)
        return self._flow.handle(event if name is None else replace(event, stage=name))
