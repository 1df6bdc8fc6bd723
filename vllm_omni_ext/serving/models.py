"""`/v1/models`: the model's card also says what it can answer with, and in which voices."""

from __future__ import annotations

from typing import Any

from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.engine.protocol import ModelList

from vllm_omni_ext.orchestrator.requests import RequestPlugin


class OmniServingModels:
    """vLLM's model list with fuller cards; everything else is vLLM's."""

    def __init__(self, stock: OpenAIServingModels, plugin: RequestPlugin) -> None:
        self._stock = stock
        self._plugin = plugin

    async def show_available_models(self) -> ModelList:
        """All cards; `modalities` and `voices` are added."""
        models = await self._stock.show_available_models()
        for card in models.data:
            card.modalities = list(self._plugin.output_modalities)  # type: ignore[attr-defined]  # extra fields
            card.voices = list(self._plugin.voices)  # type: ignore[attr-defined]
        return models

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)
