"""The painter's model. vLLM only needs its class; the worker of this package runs it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.models.interfaces import IsAttentionFree

from optional_text_image.family import HIDDEN


class Painter(nn.Module, IsAttentionFree):
    """Makes a picture darker and lighter by the mean embedding of the prompt."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        vocabulary = vllm_config.model_config.hf_config.vocab_size
        self.embedding = nn.Parameter(torch.empty(vocabulary, HIDDEN), requires_grad=False)
        self.inward = nn.Parameter(torch.empty(3, HIDDEN), requires_grad=False)
        self.outward = nn.Parameter(torch.empty(HIDDEN, 3), requires_grad=False)

    def better(self, picture: Tensor, tokens: list[int], steps: int) -> Tensor:
        """One of so many steps: float32 [height, width, 3] -> the same."""
        inner = torch.sin(picture @ self.inward + self.embedding[tokens].mean(0))
        return picture + inner @ self.outward / steps

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        raise NotImplementedError

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        raise NotImplementedError
