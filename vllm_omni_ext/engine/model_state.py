"""Makes Model Runner V2 read a step's input embeddings from the model's `InputProvider`."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu.model_states.default import DefaultModelState


class StreamingInputModelState(DefaultModelState):
    """vLLM's `DefaultModelState`, but with input embeddings from the model's `InputProvider`."""

    def prepare_inputs_embeds(
        self, scheduled_encoder_inputs: dict[str, list[int]], input_batch: Any, req_states: Any
    ) -> torch.Tensor:
        """Write the batch's input embeddings into the persistent buffer (CUDA graphs replay from it)."""
        if not self.model.in_step:  # vLLM warms its kernels up with dummy requests
            return super().prepare_inputs_embeds(scheduled_encoder_inputs, input_batch, req_states)
        rows = self.model.input_rows(list(input_batch.req_ids))
        self.inputs_embeds[: rows.shape[0]] = rows
        return self.inputs_embeds[: input_batch.num_tokens_after_padding]
