"""Chat requests that ask where their time went: `return_stage_metrics: true`."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from http import HTTPStatus
from typing import Any

from fastapi import Request
from vllm.entrypoints.generate.base.protocol import PerRequestMetrics
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionResponse
from vllm.entrypoints.serve.engine.protocol import ErrorResponse

from vllm_omni_ext.errors import RequestError
from vllm_omni_ext.observability.observer import Observer
from vllm_omni_ext.observability.record import as_metrics
from vllm_omni_ext.serving.chat import Answer, OmniServingChat
from vllm_omni_ext.serving.failures import as_vllm_error
from vllm_omni_ext.serving.spoken_stream import DONE, END, PREFIX

FIELD = "return_stage_metrics"


class MeasuredChat(OmniServingChat):
    """`OmniServingChat` whose answers may have `metrics`."""

    async def create_chat_completion(
        self, request: ChatCompletionRequest, raw_request: Request | None = None
    ) -> Answer:
        """Answer a chat request."""
        if (given := (request.model_extra or {}).get(FIELD)) is not None and not isinstance(given, bool):
            wrong = RequestError(f"{FIELD}: must be true or false, got {given!r:.100}", parameter=FIELD)
            return self.create_error_response(as_vllm_error(wrong))
        answer = await super().create_chat_completion(request, raw_request)
        if isinstance(answer, ErrorResponse) and answer.error.code == HTTPStatus.BAD_REQUEST:
            self.engine_client.observer.refused(RequestError(answer.error.message, parameter=answer.error.param or ""))
        return answer

    async def chat_completion_full_generator(
        self, request: ChatCompletionRequest, result_generator: Any, request_id: str, *args: Any, **kwargs: Any
    ) -> ErrorResponse | ChatCompletionResponse:
        """vLLM's hook: the whole answer."""
        if _asked(request):
            self.engine_client.observer.keep(request_id)
        response = await super().chat_completion_full_generator(request, result_generator, request_id, *args, **kwargs)
        if _asked(request) and isinstance(response, ChatCompletionResponse):
            stock = {} if response.metrics is None else response.metrics.model_dump(exclude_none=True)
            response.metrics = PerRequestMetrics(**stock, **_metrics(self.engine_client.observer, request_id))
        return response

    def chat_completion_stream_generator(
        self,
        request: ChatCompletionRequest,
        result_generator: Any,
        request_id: str,
        model_name: str,
        *args: Any,
        **kwargs: Any,
    ) -> AsyncGenerator[str, None]:
        """vLLM's hook: the answer as server-sent events."""
        events = super().chat_completion_stream_generator(
            request, result_generator, request_id, model_name, *args, **kwargs
        )
        if not _asked(request):
            return events
        self.engine_client.observer.keep(request_id)
        return _with_metrics(events, self.engine_client.observer, request_id, model_name)


def _asked(request: ChatCompletionRequest) -> bool:
    return bool((request.model_extra or {}).get(FIELD))


def _metrics(observer: Observer, request_id: str) -> dict[str, Any]:
    record = observer.course(request_id)
    return {} if record is None else as_metrics(record)


async def _with_metrics(
    events: AsyncGenerator[str, None], observer: Observer, request_id: str, model: str
) -> AsyncGenerator[str, None]:
    """The same events, with the metrics in the usage chunk, or in a chunk before the end if there is none."""
    due = True
    async with aclosing(events):
        async for event in events:
            chunk: dict[str, Any] | None = None
            if event == DONE and due:
                head = {"id": request_id, "object": "chat.completion.chunk", "created": int(time.time())}
                chunk = {**head, "model": model, "choices": []}
                yield _event({**chunk, "metrics": _metrics(observer, request_id)})
            elif due and '"choices":[]' in event and (chunk := _usage(event)) is not None:
                chunk["metrics"] = {**(chunk.get("metrics") or {}), **_metrics(observer, request_id)}
                event, due = _event(chunk), False
            yield event


def _usage(event: str) -> dict[str, Any] | None:
    """The chunk, if it is the one with the usage of the whole answer."""
    chunk: dict[str, Any] = json.loads(event.removeprefix(PREFIX))
    return chunk if chunk.get("choices") == [] and chunk.get("usage") is not None else None


def _event(chunk: dict[str, Any]) -> str:
    return f"{PREFIX}{json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}{END}"
