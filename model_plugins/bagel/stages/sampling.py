"""Chooses the next token of a reply by vLLM's `SamplingParams`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from vllm.model_executor.layers.utils import apply_penalties
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

_NOT_POSSIBLE = (
    "logprobs",
    "prompt_logprobs",
    "min_p",
    "min_tokens",
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "structured_outputs",
)
_GREEDY_BELOW = 1e-5
"""As in vLLM."""


class Sampling:
    """Chooses the tokens of one reply.

    Args:
        prompt: ids of the prompt.
        params: parameters of the request.

    Raises:
        ValueError: a parameter is set that is not possible here; the message contains its name.
    """

    def __init__(self, prompt: Sequence[int], params: SamplingParams) -> None:
        for name in _NOT_POSSIBLE:
            if getattr(params, name, None) not in (None, False, 0, [], {}):
                raise ValueError(f"{name}: is not possible in a stage that also makes pictures")
        self._prompt, self._params = prompt, params
        self._generator = torch.Generator("cpu")
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)

    def choose(self, logits: Tensor, generated: Sequence[int]) -> int:
        """Return the next id; `logits`: `[vocabulary]` float32, `generated`: ids so far without the prompt."""
        params, row = self._params, self._penalized(logits[None], generated)
        if params.temperature < _GREEDY_BELOW:
            return int(row.argmax())
        top_k = None if params.top_k < 1 else torch.tensor([min(params.top_k, row.shape[1])], device=row.device)
        top_p = None if params.top_p >= 1 else torch.tensor([params.top_p], device=row.device)
        row = apply_top_k_top_p(row / params.temperature, top_k, top_p)
        return int(torch.multinomial(row[0].softmax(-1).cpu(), 1, generator=self._generator))

    def _penalized(self, row: Tensor, generated: Sequence[int]) -> Tensor:
        params = self._params
        values = params.presence_penalty, params.frequency_penalty, params.repetition_penalty
        if values == (0, 0, 1):
            return row
        ids = [torch.tensor([list(each)], dtype=torch.int64, device=row.device) for each in (self._prompt, generated)]
        return apply_penalties(row.clone(), *ids, *(torch.tensor([value], device=row.device) for value in values))
