"""The part of a talker that is the same in all families: a `StreamingInputModel` with M-RoPE positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.models.interfaces import SupportsMRoPE

from vllm_omni_ext.engine.streaming_model import StreamingInputBase


class StreamedTalker(StreamingInputBase, nn.Module, SupportsMRoPE):
    """A `StreamingInputModel`. A subclass has `input_provider`, and `codes`, the size of the vocabulary."""

    input_provider: Any
    codes: int

    def codec_rows(self, ids: Tensor) -> Tensor:
        """Return the input embeddings [n, hidden] of codes [n] of the first code group."""
        raise NotImplementedError

    def embed_input_ids(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return input embeddings for the V1 runner; outside a step of `StreamingInput`, ids are embedded as codes."""
        if not self.in_step:
            return self.codec_rows(input_ids.clamp(max=self.codes - 1))
        return self.input_rows(None)

    def get_mrope_input_positions(self, input_tokens: list[int], mm_features: list[Any]) -> tuple[Tensor, int]:
        """Return M-RoPE positions [3, n] and delta of the next request that the runner adds in this step."""
        if not self.opened:
            return torch.arange(len(input_tokens)).expand(3, -1), 0
        first, *self.opened = self.opened
        positions: tuple[Tensor, int] = self.input_provider.positions(first, len(input_tokens))
        return positions


def positions_of(prompt: Tensor | None, length: int) -> tuple[Tensor, int]:
    """Return M-RoPE positions [3, length] of the first tokens of a request, and the delta of later positions.

    Args:
        prompt: int64 [3, n], the positions of its prompt; None: those of a text.
    """
    if prompt is None:
        return torch.arange(length).expand(3, -1), 0
    after = int(prompt.max()) + 1
    delta = after - prompt.shape[1]
    tail = torch.arange(after, after + max(0, length - prompt.shape[1])).expand(3, -1)
    return torch.cat([prompt, tail], dim=1)[:, :length], delta


def positions_from(data: bytes | None) -> Tensor | None:
    """Return int32 positions in row-major order as int64 [3, n]."""
    return None if data is None else torch.frombuffer(bytearray(data), dtype=torch.int32).long().view(3, -1)
