"""Model Runner V2 adapter: the step's input rows come from the model's feeder."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu.model_states.default import DefaultModelState


class FeedModelState(DefaultModelState):
    """`DefaultModelState` whose input embeddings are the model's own rows."""

    def prepare_inputs_embeds(
        self, scheduled_encoder_inputs: dict[str, list[int]], input_batch: Any, req_states: Any
    ) -> torch.Tensor:
        """Write the rows of the batch into the persistent buffer (CUDA graphs replay from it)."""
        if not self.model.in_step:  # vLLM warms its kernels up with requests of its own
            return super().prepare_inputs_embeds(scheduled_encoder_inputs, input_batch, req_states)
        rows = self.model.input_rows(list(input_batch.req_ids))
        self.inputs_embeds[: rows.shape[0]] = rows
        return self.inputs_embeds[: input_batch.num_tokens_after_padding]
