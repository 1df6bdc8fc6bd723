"""Requests for the engines of stages behind the text stage."""

from __future__ import annotations

import time

from vllm.pooling_params import PoolingParams
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreRequest

from vllm_omni_ext.orchestrator.flow import Open
from vllm_omni_ext.wire.handoff import PROMPT


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


def opening(request_id: str, action: Open, params: SamplingParams, room: int | None) -> EngineCoreRequest:
    """The request that opens a fed stage.

    Args:
        params: what was asked for; changed into what the engine is told.
        room: most tokens the stage may make, those made before included; None: no limit but its own.
    """
    params.extra_args = {PROMPT: dict(action.handoff)}
    params.output_kind = RequestOutputKind.DELTA
    params.detokenize = False
    if room is not None:
        params.max_tokens = min(params.max_tokens or room, room)
    if params.max_tokens is not None:
        params.max_tokens -= action.done
    params.min_tokens = max(0, params.min_tokens - action.done)
    params.stop_token_ids = [*(params.stop_token_ids or ()), *action.stop]
    params._all_stop_token_ids = {*params._all_stop_token_ids, *action.stop}
    return engine_request(request_id, action.prompt, sampling=params)
