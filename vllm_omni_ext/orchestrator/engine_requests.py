"""Requests for the engines of stages behind the text stage."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

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


def stage_sampling(
    action: Open, *, given: SamplingParams | None, default: Mapping[str, Any], room: int | None
) -> SamplingParams:
    """What a stage that is opened samples with.

    Args:
        given: with the request; None: `default` holds.
        room: most tokens it may make, all together; None: no limit is known.
    """
    params = SamplingParams(**default) if given is None else given.clone()
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
    return params
