"""Schedulers of both stages.

The scheduler of `dit` limits the running requests by memory and tokens. The scheduler of `ar` computes all tokens of an
input picture in one step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import torch
from vllm.platforms import current_platform
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from vllm_omni_ext.engine.plain_stage import PlainScheduler
from vllm_omni_ext.engine.scheduler import scheduler_factory
from vllm_omni_ext.model_plugins.bagel.memory import (
    FLOAT32_BYTES,
    autoencoder_elements,
    kv_bytes_per_token,
    step_elements,
)
from vllm_omni_ext.model_plugins.bagel.model import Bagel
from vllm_omni_ext.model_plugins.bagel.requests.payloads import Draw
from vllm_omni_ext.model_plugins.bagel.sizes import BagelSizes
from vllm_omni_ext.model_plugins.bagel.stages.files import checkpoint_directory, model_sizes
from vllm_omni_ext.model_plugins.bagel.stages.segments import costs
from vllm_omni_ext.model_plugins.bagel.tokens import Tokens
from vllm_omni_ext.plugins.memory import LIBRARY_BYTES
from vllm_omni_ext.wire.stage_input import END, PART, PartHeader, StageInput

CONTEXT_BYTES, ROW_TOKENS = "bytes of context", "tokens of a denoise step"
"""Names of the resources in `limits`; they are part of the error to a client whose request is too large."""

CPU_CONTEXT_BYTES = 2 << 30
"""Bytes of memory for contexts (keys and values of requests) on a CPU."""


class DitScheduler(PlainScheduler):
    """Limits the running requests by memory for contexts, tokens in a denoise step, and `max_num_seqs`.

    A picture adds (guidance branches x (latent tokens + 2)) tokens to a denoise step. The limit of these tokens is
    `max_num_batched_tokens`.
    """

    def __init__(self, vllm_config: Any, **given: Any) -> None:
        super().__init__(vllm_config, **given)
        config = vllm_config.model_config
        self._sizes = model_sizes(config)
        self._tokens = Tokens.from_directory(checkpoint_directory(config))
        self._element_bytes = config.dtype.itemsize
        self.limits = {
            CONTEXT_BYTES: context_budget(vllm_config, self._sizes),
            ROW_TOKENS: vllm_config.scheduler_config.max_num_batched_tokens,
        }

    def costs(self, request: Request) -> Mapping[str, float]:
        """Return the cost of a picture or text request in each resource of `limits`. ValueError: it is invalid."""
        payload, ends_stream = _message(request)
        if ends_stream:
            return {}
        if payload is not None:
            kept, rows = costs(msgspec.convert(payload, Draw), self._sizes, self._tokens, self._element_bytes)
            return {CONTEXT_BYTES: kept, ROW_TOKENS: rows}
        longest = min(request.num_prompt_tokens + request.max_tokens, self._model_config.max_model_len)
        return {CONTEXT_BYTES: longest * kv_bytes_per_token(self._sizes.llm, self._element_bytes), ROW_TOKENS: 1}


def context_budget(vllm_config: Any, sizes: BagelSizes) -> int:
    """Return the most bytes that all contexts (keys and values) may take together.

    On a GPU, that is `gpu_memory_utilization` less the weights, the activations of a denoise step and of the
    autoencoder, and the workspaces of libraries, as the planner counts them (`stages.facts`).
    """
    if vllm_config.device_config.device_type == "cpu":
        return CPU_CONTEXT_BYTES
    dtype, tokens = vllm_config.model_config.dtype, vllm_config.scheduler_config.max_num_batched_tokens
    activations = (tokens * sum(step_elements(sizes.llm)) + autoencoder_elements(sizes)) * dtype.itemsize
    given = int(current_platform.get_device_total_memory() * vllm_config.cache_config.gpu_memory_utilization)
    return max(0, given - weight_bytes(sizes, dtype) - activations - LIBRARY_BYTES)


def weight_bytes(sizes: BagelSizes, dtype: torch.dtype) -> int:
    """Return the bytes of all weights; the autoencoder is float32."""
    with torch.device("meta"):
        model = Bagel(sizes)
    whole, vae = (sum(each.numel() for each in part.parameters()) for part in (model, model.vae))
    return (whole - vae) * dtype.itemsize + vae * FLOAT32_BYTES


def _message(request: Request) -> tuple[Any, bool]:
    """Return the plugin's message in a request (None for a text request), and whether it only ends a stream."""
    extra = (request.sampling_params.extra_args if request.sampling_params else None) or {}
    if PART not in extra:
        return StageInput.of(extra)[0].payload, False
    part = PartHeader.of(extra[PART])
    return part.payload, part.part == END


class WholePictures(Scheduler):
    """vLLM's scheduler, but it ends a prompt chunk before a picture that does not fit into the step.

    A picture must not be divided, since its tokens attend to each other. vLLM's `disable_chunked_mm_input` does not
    prevent every division: if a picture's first token is the first token of a request's chunk and other requests leave
    too few tokens in the step, vLLM divides the picture.
    """

    def _try_schedule_encoder_inputs(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int, *given: Any, **named: Any
    ) -> Any:
        places = ((each.mm_position.offset, each.mm_position.length) for each in request.mm_features)
        fitting = tokens_before_a_part(places, num_computed_tokens, num_new_tokens)
        return super()._try_schedule_encoder_inputs(request, num_computed_tokens, fitting, *given, **named)


def tokens_before_a_part(places: Iterable[tuple[int, int]], computed: int, new: int) -> int:
    """Return how many of the next tokens can be computed without dividing a picture.

    Args:
        places: (first position, number of tokens) of each picture.
        computed: number of tokens of the request that have been computed.
        new: number of next tokens that fit into the step.
    """
    for start, length in places:
        if computed < start + length and start < computed + new < start + length:
            return max(0, start - computed)
    return new


picture_scheduler = scheduler_factory(WholePictures)
"""The `scheduler_cls` of the stage `ar`."""
