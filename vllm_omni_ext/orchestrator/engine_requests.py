"""Requests for the engines of stages behind the text stage."""

from __future__ import annotations

import time

from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest


def engine_request(
    engine_id: str, prompt: list[int], *, sampling: SamplingParams | None = None, pooling: PoolingParams | None = None
) -> EngineCoreRequest:
    """A request that arrives now; either `sampling` or `pooling` says what is asked for."""
    return EngineCoreRequest(
        request_id=engine_id,
        prompt_token_ids=prompt,
        mm_features=None,
        sampling_params=sampling,
        pooling_params=pooling,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
