"""`/v1/models`: the model's card also lists its output modalities, and the plugin's entries (e.g. voices)."""

from __future__ import annotations

from typing import Any

from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.engine.protocol import ModelList

from vllm_omni_ext.serving.served import ServedModel


class OmniServingModels:
    """vLLM's model list with additional entries in the cards."""

    def __init__(self, stock: OpenAIServingModels, model: ServedModel) -> None:
        self._stock = stock
        capabilities = model.capabilities
        self._facts = {"modalities": list(capabilities.modalities), **capabilities.card, **model.surface.card()}

    async def show_available_models(self) -> ModelList:
        """Return all cards."""
        models = await self._stock.show_available_models()
        for card in models.data:
            for name, fact in self._facts.items():
                setattr(card, name, fact)  # cards allow extra fields
        return models

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)
