"""What the two engines of a KV edge are asked for one text request."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgspec
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from vllm_omni_ext.disaggregation.parameters import KEY, new_transfer_id, prefill_sampling, prefill_transfer
from vllm_omni_ext.wire.handoff import EXPORT

SHORTEST_PROMPT = 2
"""Tokens. The last one is always computed by who answers: of a shorter prompt nothing can be handed over."""


def can_be_split(request: EngineCoreRequest) -> bool:
    """Whether its prompt may be computed elsewhere; if not, one engine does all of it.

    Logprobs of the prompt are made where it is computed, and who must not read the prefix cache takes no KV cache over
    either. (Rows that are exported are made once, so that rule is for the prompt's engine alone.)
    """
    params, prompt = request.sampling_params, request.prompt_token_ids
    if params is None or prompt is None or len(prompt) < SHORTEST_PROMPT or request.prompt_embeds is not None:
        return False
    return params.prompt_logprobs is None and (not params.skip_reading_prefix_cache or EXPORT in _extra(params))


def prefill_request(request: EngineCoreRequest, engine_id: str) -> EngineCoreRequest:
    """For the engine that computes the prompt, under a transfer id that no other attempt has."""
    given = request.sampling_params
    assert given is not None
    extra = {KEY: prefill_transfer(new_transfer_id())}
    if EXPORT in _extra(given):
        extra[EXPORT] = _extra(given)[EXPORT]
    params = SamplingParams(
        **prefill_sampling(), extra_args=extra, skip_reading_prefix_cache=given.skip_reading_prefix_cache
    )
    return msgspec.structs.replace(request, request_id=engine_id, sampling_params=params)


def decode_request(request: EngineCoreRequest, engine_id: str, transfer: Mapping[str, Any] | None) -> EngineCoreRequest:
    """For the engine that answers.

    Args:
        transfer: where the prompt's KV cache is; None: the engine computes it, and does all else that is asked.
    """
    if transfer is None:
        return msgspec.structs.replace(request, request_id=engine_id)
    assert request.sampling_params is not None
    params = request.sampling_params.clone()
    extra = {key: value for key, value in _extra(params).items() if key != EXPORT}
    if len(extra) < len(_extra(params)):
        params.skip_reading_prefix_cache = False
    params.extra_args = {**extra, KEY: dict(transfer)}
    return msgspec.structs.replace(request, request_id=engine_id, sampling_params=params)


def farewell(engine_id: str, transfer: Mapping[str, Any]) -> EngineCoreRequest:
    """For any engine that answers: nobody will fetch this KV cache. It ends as it arrives, without an output.

    As vLLM's `AsyncLLM.notify_kv_transfer_request_rejected` makes it.
    """
    return EngineCoreRequest(
        request_id=engine_id,
        prompt_token_ids=[0],
        mm_features=None,
        sampling_params=SamplingParams(max_tokens=1, extra_args={KEY: dict(transfer)}),
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        abort_immediately=True,
    )


def _extra(params: SamplingParams) -> Mapping[str, Any]:
    return params.extra_args or {}
