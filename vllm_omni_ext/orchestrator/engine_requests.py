"""Builds vLLM's `EngineCoreRequest`s from the effects of the request machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from types import MappingProxyType
from typing import Any

import msgspec
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreRequest

from vllm_omni_ext.disaggregation.parameters import (
    KEY,
    SHORTEST_PROMPT,
    new_transfer_id,
    prefill_sampling,
    prefill_transfer,
)
from vllm_omni_ext.errors import StageUnavailable
from vllm_omni_ext.orchestrator import messages as m
from vllm_omni_ext.plugins.flow import Extend, Open, Submit
from vllm_omni_ext.wire.priorities import of_part
from vllm_omni_ext.wire.stage_input import (
    CHUNK,
    END,
    EXPORT,
    EXPORTED,
    FILLER,
    INPUT,
    PART,
    RESUMED,
    PartHeader,
    StageInput,
    export_ranges,
)

_CHUNK_PARAMS = SamplingParams()
"""Template that is copied for each chunk: creating parameters takes longer than all other work, as vLLM validates."""
for _name in ("stop", "stop_token_ids", "bad_words", "skip_reading_prefix_cache"):
    setattr(_CHUNK_PARAMS, _name, None)  # not sent: a third of a chunk's message; set when the engine decodes it


def client_request(request: EngineCoreRequest) -> m.ClientRequest:
    """Return a client's request with the properties that decide which replicas may run it."""
    return m.ClientRequest(
        request=request,
        can_split=can_be_split(request),
        can_resume=can_resume(request),
        session=request.session_id,
        media=tuple(feature.identifier for feature in request.mm_features or ()),
    )


def cache_scope(request: EngineCoreRequest) -> str:
    """Return the scope of a client's request in prefix caches: its cache salt and LoRA adapter; "" without both."""
    lora = request.lora_request
    adapter = () if lora is None else (lora.lora_int_id, lora.lora_name, lora.lora_path)
    return repr((request.cache_salt, *adapter)) if adapter or request.cache_salt else ""


def can_be_split(request: EngineCoreRequest) -> bool:
    """Return whether a prefill stage may compute the prompt; otherwise one engine does prefill and decode.

    Only the engine that computes the prompt can return prompt logprobs. A request that must not read the prefix cache
    cannot use a transferred KV cache. A request that skips the prefix cache only to export hidden states can be split:
    the prefill engine exports those of the prompt. A request that also exports hidden states of its answer can be split
    if its flow can use hidden states from both engines (`EXPORTED`).
    """
    params, prompt = request.sampling_params, request.prompt_token_ids
    if params is None or prompt is None or len(prompt) < SHORTEST_PROMPT or request.prompt_embeds is not None:
        return False
    extra = _extra(params)
    if EXPORTED not in extra and _exports_after(len(prompt), extra):
        return False
    return params.prompt_logprobs is None and (not params.skip_reading_prefix_cache or EXPORT in extra)


def _exports_after(length: int, extra: Mapping[str, Any]) -> bool:
    """Return whether a request exports hidden states after its prompt of this length."""
    return any(stop > length for _, stop in export_ranges(extra))


def can_resume(request: EngineCoreRequest) -> bool:
    """Return whether another engine can continue the request after its tokens, which it gets as part of the prompt.

    A request without token ids cannot be continued; for the others see `_can_continue`.
    """
    params = request.sampling_params
    return params is not None and request.prompt_token_ids is not None and _can_continue(params)


def _can_continue(params: SamplingParams) -> bool:
    """Return whether generation with these parameters continues unchanged after tokens that become prompt.

    Not with prompt logprobs, and not with parameters for which vLLM treats prompt and generated tokens differently.
    `repetition_penalty` counts both alike, and a bad word of one token does not depend on the tokens before it.
    """
    depends_on_generated = (
        params.structured_outputs is not None
        or params.presence_penalty != 0
        or params.frequency_penalty != 0
        or any(len(word) > 1 for word in params.bad_words_token_ids or ())
        or params.repetition_detection is not None
        or params.thinking_token_budget is not None
        or params.trace_decode_token_ids is not None
    )
    return params.prompt_logprobs is None and not depends_on_generated


def without_ends_of_text(params: SamplingParams, given: SamplingParams) -> SamplingParams:
    """Return a copy of `params`, those of a rendered request, with the stop tokens of `given`, which are the client's.

    vLLM adds the ids that end a text, of the tokenizer and the generation config. In a request that a flow opens, the
    same ids may be codes of a sound; `Open.stop` has the ids that end it.
    """
    own = params.clone()
    own.stop_token_ids = list(given.stop_token_ids or ())
    own._all_stop_token_ids = set(own.stop_token_ids)
    own._eos_token_id = None
    return own


class EngineRequests:
    """Builds the engine request for each `Send` effect.

    Args:
        defaults: default parameter fields, by stage (named as in flows).
        types: constructors of stage parameters, by stage; `SamplingParams` for a missing stage.
    """

    def __init__(
        self,
        defaults: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
        types: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
    ) -> None:
        self._defaults = defaults
        # Computed once: a wall clock that is set back must not change the order of parts.
        self._clock_offset = time.time() - time.monotonic()
        self._types = types
        self._makers: dict[type, Callable[[Any], EngineCoreRequest]] = {
            m.SendPrompt: prompt_request,
            m.SendOpen: self._opening,
            m.SendChunk: _chunk,
            m.SendPart: self._part,
            m.SendStreamEnd: self._stream_end,
            m.SendKVRelease: _kv_release,
        }

    def make(self, send: m.Send) -> EngineCoreRequest:
        """Return the engine request for one effect.

        Raises:
            StageUnavailable: tokens that were generated before a loss cannot be continued with their parameters.
            Exception: vLLM's errors for wrong parameters.
        """
        return self._makers[type(send)](send)

    def _parameters(self, stage: str, given: Any) -> tuple[SamplingParams, Any]:
        """Return (vLLM's parameters, the stage's own parameters as plain data or None).

        The second value is set if the stage's parameters are not vLLM's `SamplingParams`.
        """
        params = self._types.get(stage, SamplingParams)(**self._defaults.get(stage, {})) if given is None else given
        if isinstance(params, SamplingParams):
            return (params if given is None else params.clone()), None
        return SamplingParams(), msgspec.to_builtins(params, builtin_types=(bytes,))

    def _opening(self, send: m.SendOpen) -> EngineCoreRequest:
        action, budget = send.action, send.budget
        params, own = self._parameters(action.stage, send.params)
        if action.done and not _can_continue(params):
            raise StageUnavailable(
                f"no other request can continue the tokens that stage '{action.stage}' has generated"
            )
        params.extra_args = {**(params.extra_args or {}), INPUT: _stage_input(action, own)}
        if action.export:
            params.extra_args[EXPORT] = [list(span) for span in action.export]
            params.skip_reading_prefix_cache = True  # `KeptExports` reads it as far as hidden states are kept
        params.output_kind = RequestOutputKind.DELTA
        params.detokenize = False
        if budget is not None:
            params.max_tokens = min(params.max_tokens or budget, budget)
        if params.max_tokens is not None:
            params.max_tokens -= action.done
        params.min_tokens = max(0, params.min_tokens - action.done)
        params.stop_token_ids = [*(params.stop_token_ids or ()), *action.stop]
        params._all_stop_token_ids = {*params._all_stop_token_ids, *action.stop}
        request = _request(
            send.engine_id,
            list(action.prompt),
            sampling=params,
            features=action.features,
            priority=send.priority,
        )
        request.lora_request, request.cache_salt = send.scope
        return _for_side(request, send)

    def _part(self, send: m.SendPart) -> EngineCoreRequest:
        action = send.action
        header = PartHeader(
            stream=send.stream,
            part=action.part,
            last=action.last,
            empty=not action.prompt,
            payload=_plain(action.payload),
        )
        return self._in_stream(send.engine_id, action, header, send.params, self._due(action, send.priority))

    def _stream_end(self, send: m.SendStreamEnd) -> EngineCoreRequest:
        header = PartHeader.end(send.stream)
        return self._in_stream(send.engine_id, send.action, header, None, self._due(send.action, send.priority))

    def _due(self, action: Submit, priority: int) -> int:
        """Return vLLM's priority of a part: by the request's `priority`, then by the time at which the part is due."""
        due = time.monotonic() if action.due is None else action.due
        return of_part(priority, round(1e3 * (due + self._clock_offset)))

    def _in_stream(
        self, engine_id: str, action: Submit, header: PartHeader, given: Any, priority: int
    ) -> EngineCoreRequest:
        ends = header.part == END
        prompt = FILLER if ends or not action.prompt else list(action.prompt)
        features = () if ends else action.features
        if action.pooling_task is not None:
            pooling = PoolingParams(task=action.pooling_task, extra_kwargs=header.as_extra())  # type: ignore[arg-type]
            return _request(engine_id, prompt, pooling=pooling, features=features, priority=priority)
        params, own = self._parameters(action.stage, given)
        params.extra_args = {**(params.extra_args or {}), PART: msgspec.structs.replace(header, params=own).as_extra()}
        params.output_kind = RequestOutputKind.DELTA
        params.detokenize = False
        return _request(engine_id, prompt, sampling=params, features=features, priority=priority)


def prompt_request(send: m.SendPrompt) -> EngineCoreRequest:
    """Return the client's request, adapted for prefill, decode or both."""
    request = (_recomputed if send.recompute else _resumed)(send.request, send.tokens)
    return _for_side(msgspec.structs.replace(request, request_id=send.engine_id), send)


def _for_side(request: EngineCoreRequest, send: m.SendPrompt | m.SendOpen) -> EngineCoreRequest:
    """Return the request, adapted for prefill, decode or both."""
    match send.side:
        case "prefill":
            return _prefill(request)
        case "decode":
            return _decode(request, send.kv or {})
        case _:
            return request


def _resumed(request: EngineCoreRequest, tokens: Sequence[int]) -> EngineCoreRequest:
    """Return the request with generated tokens appended to its prompt, so that it continues after them."""
    if not tokens:
        return request
    assert request.sampling_params is not None and request.prompt_token_ids is not None
    params = request.sampling_params.clone()
    if params.max_tokens is not None:
        params.max_tokens -= len(tokens)
    params.min_tokens = max(0, params.min_tokens - len(tokens))
    params.extra_args = {**_extra(params), RESUMED: len(tokens)}
    return msgspec.structs.replace(
        request, prompt_token_ids=[*request.prompt_token_ids, *tokens], sampling_params=params
    )


def _recomputed(request: EngineCoreRequest, tokens: Sequence[int]) -> EngineCoreRequest:
    """Return a request that computes the prompt with `tokens` appended, and generates one token, vLLM's minimum."""
    assert request.sampling_params is not None and request.prompt_token_ids is not None
    params = request.sampling_params.clone()
    params.max_tokens, params.min_tokens = 1, 0
    params.logprobs = params.prompt_logprobs = params.structured_outputs = None
    return msgspec.structs.replace(
        request, prompt_token_ids=[*request.prompt_token_ids, *tokens], sampling_params=params
    )


def _prefill(request: EngineCoreRequest) -> EngineCoreRequest:
    """Return the request for the prefill engine, with a new transfer id.

    The engine gets all of `extra_args`: the stage's worker may compute the prompt with them.
    """
    given = request.sampling_params
    assert given is not None
    extra = {**_extra(given), KEY: prefill_transfer(new_transfer_id())}
    params = SamplingParams(
        **prefill_sampling(), extra_args=extra, skip_reading_prefix_cache=given.skip_reading_prefix_cache
    )
    return msgspec.structs.replace(request, sampling_params=params)


def _decode(request: EngineCoreRequest, transfer: Mapping[str, Any]) -> EngineCoreRequest:
    """Return the request for the decode engine, which fetches the prompt's KV cache.

    It exports hidden states after the prompt only.
    """
    assert request.sampling_params is not None and request.prompt_token_ids is not None
    params, length = request.sampling_params.clone(), len(request.prompt_token_ids)
    extra = dict(_extra(params))
    if EXPORT in extra:
        params.skip_reading_prefix_cache = False
        if _exports_after(length, extra):
            extra[EXPORTED] = length
        else:
            del extra[EXPORT]
    params.extra_args = {**extra, KEY: dict(transfer)}
    return msgspec.structs.replace(request, sampling_params=params)


def _kv_release(send: m.SendKVRelease) -> EngineCoreRequest:
    """Return a request that releases a KV cache, for any decode engine. It ends at once, without an output.

    vLLM's `AsyncLLM.notify_kv_transfer_request_rejected` builds the same message.
    """
    params = SamplingParams(max_tokens=1, extra_args={KEY: dict(send.kv)})
    return msgspec.structs.replace(_request(send.engine_id, FILLER, sampling=params), abort_immediately=True)


def _chunk(send: m.SendChunk) -> EngineCoreRequest:
    """Return a request that carries a chunk for an open request: it has the same id and no prompt of its own."""
    params = copy(_CHUNK_PARAMS)
    params.extra_args = {CHUNK: _stage_input(send.action)}
    return msgspec.structs.replace(_request(send.engine_id, FILLER, sampling=params), resumable=True)


def _stage_input(action: Open | Extend, own_params: Any = None) -> dict[str, Any]:
    given: dict[str, Any] = {}
    if isinstance(action, Open):
        given = {
            "hidden_spans": tuple(map(tuple, action.hidden_spans)),
            "done": action.done,
            "prefix_keys": tuple(action.prefix_keys),
            "params": own_params,
        }
        if action.group > 1:
            given |= {"group": action.group, "rate": action.rate}
    message = StageInput(
        prompt_positions=action.prompt_positions,
        step_inputs=action.step_inputs,
        last=action.last,
        hidden_states=action.hidden_states,
        payload=_plain(action.payload),
        **given,
    )
    plain: dict[str, Any] = msgspec.to_builtins(message, builtin_types=(bytes,))
    return plain


def _plain(payload: msgspec.Struct | None) -> Any:
    return None if payload is None else msgspec.to_builtins(payload, builtin_types=(bytes,))


def _request(
    engine_id: str,
    prompt: list[int],
    *,
    sampling: SamplingParams | None = None,
    pooling: PoolingParams | None = None,
    features: Sequence[Any] = (),
    priority: int = 0,
) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=engine_id,
        prompt_token_ids=prompt,
        mm_features=list(features) or None,
        sampling_params=sampling,
        pooling_params=pooling,
        arrival_time=time.time(),
        priority=priority,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


def _extra(params: SamplingParams) -> Mapping[str, Any]:
    return params.extra_args or {}
