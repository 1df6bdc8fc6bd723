"""State of one text request in the stage `dit`: an ordinary request of vLLM, which is answered with tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from vllm.model_executor.layers.utils import apply_penalties
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from vllm_omni_ext.engine.plain_stage import Answer, PlainRequest
from vllm_omni_ext.model_plugins.bagel.model import Bagel
from vllm_omni_ext.model_plugins.bagel.prefill import Prefill
from vllm_omni_ext.model_plugins.bagel.prompts import Prompts, Segments, TextSegment
from vllm_omni_ext.model_plugins.bagel.requests.parts import cut_at_pictures
from vllm_omni_ext.model_plugins.bagel.stages.processor import VIT
from vllm_omni_ext.model_plugins.bagel.text import RunningText
from vllm_omni_ext.plugins.spec import LOGPROBS
from vllm_omni_ext.wire.stage_input import generated_before

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
"""Temperature below which sampling is greedy, as in vLLM."""


class Reply:
    """A text request in the stage `dit`. The scheduler ends the request at a stop token or at the length limit.

    Attributes:
        text: the ids that were generated so far, with their context; None before the prefill.
    """

    def __init__(self, model: Bagel, request: PlainRequest) -> None:
        """Check a request, and begin without any computation. ValueError: the request is invalid."""
        self._model, self._prompt, self._features = model, list(request.prompt), list(request.features)
        self._sampling = Sampling(self._prompt, request.params)
        ends = [feature.mm_position.offset + feature.mm_position.length for feature in self._features]
        if len(self._prompt) <= max(ends, default=0):
            raise ValueError("prompt: must end with text")
        self.text: RunningText | None = None

    @property
    def needs_turn(self) -> bool:
        """Whether the request's next work is its prefill."""
        return self.text is None

    @property
    def denoises(self) -> bool:
        """False: a text request has no denoise steps."""
        return False

    @property
    def writes(self) -> bool:
        """Whether the request's next work is a token."""
        return self.text is not None

    def turn(self) -> None:
        """Prefill the prompt except its last id, which the first call of `next_logits` computes."""
        model = self._model
        segments = reply_segments(self._prompt[:-1], self._features, Prompts(model.tokens, model.sizes))
        context = Prefill(model, torch.Generator()).context(segments)
        self.text = RunningText(model, context, len(self._prompt), first=self._prompt[-1])

    def wrote(self, logits: Tensor) -> Answer:
        """Sample the next token from `logits` `[vocabulary]` float32; return the answer with the token."""
        assert self.text is not None
        token = self._sampling.choose(logits, self.text.ids[1:])
        self.text.ids.append(token)
        return Answer(None, tokens=(token,))


def reply_segments(ids: Sequence[int], features: Sequence[Any], prompts: Prompts) -> Segments:
    """Return the segments of a rendered prompt.

    Args:
        ids: token ids of the prompt, with the placeholders of the pictures.
        features: vLLM's `MultiModalFeatureSpec`s; `data` has the picture for the ViT (`processor.py`).
        prompts: creates the model's segments.

    Raises:
        ValueError: the data of a picture is missing.
    """
    found: Segments = ()
    for before, feature in cut_at_pictures(ids, features):
        if before:
            found = (*found, TextSegment(tuple(before)))
        if feature is None:
            continue
        if feature.data is None:
            raise ValueError("prompt: the data of a picture is missing")
        found = (*found, prompts.seen(Image.fromarray(feature.data[VIT].data.cpu().numpy())))
    return found


class Sampling:
    """Samples the tokens of one reply.

    A reply that a lost replica has begun goes on as there: penalties count the tokens that it has generated, which are
    at the end of the prompt, and the random generator is advanced past the numbers that it has drawn for them.

    Args:
        prompt: token ids of the prompt.
        params: parameters of the request.

    Raises:
        ValueError: a parameter is set that this stage does not support; the message contains its name.
    """

    def __init__(self, prompt: Sequence[int], params: SamplingParams) -> None:
        for name in _NOT_POSSIBLE:
            value = getattr(params, name, None)
            if value if name not in LOGPROBS else value is not None:  # 0 is a number of log probabilities
                raise ValueError(f"{name}: is not possible in a stage that also makes pictures")
        self._params = params
        own = len(prompt) - generated_before(params.extra_args or {})
        self._prompt, self._before = prompt[:own], prompt[own:]
        self._drawn_before = 0 if params.seed is None else len(self._before)
        self._generator = torch.Generator("cpu")
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)

    def choose(self, logits: Tensor, generated: Sequence[int]) -> int:
        """Return the next token id; `logits`: `[vocabulary]` float32, `generated`: ids so far without the prompt."""
        params, row = self._params, self._penalized(logits[None], generated)
        if params.temperature < _GREEDY_BELOW:
            return int(row.argmax())
        top_k = None if params.top_k < 1 else torch.tensor([min(params.top_k, row.shape[1])], device=row.device)
        top_p = None if params.top_p >= 1 else torch.tensor([params.top_p], device=row.device)
        row = apply_top_k_top_p(row / params.temperature, top_k, top_p)
        probabilities = row[0].softmax(-1).cpu()
        for _ in range(self._drawn_before):  # here, as the size of the vocabulary decides how many numbers a draw takes
            torch.multinomial(torch.ones_like(probabilities), 1, generator=self._generator)
        self._drawn_before = 0
        return int(torch.multinomial(probabilities, 1, generator=self._generator))

    def _penalized(self, row: Tensor, generated: Sequence[int]) -> Tensor:
        params = self._params
        values = params.presence_penalty, params.frequency_penalty, params.repetition_penalty
        if values == (0, 0, 1):
            return row
        parts = self._prompt, [*self._before, *generated]
        ids = [torch.tensor([list(each)], dtype=torch.int64, device=row.device) for each in parts]
        return apply_penalties(row.clone(), *ids, *(torch.tensor([value], device=row.device) for value in values))
