"""Adds checks to vLLM's endpoints that return only text: completions, responses, messages, and batches of chats.

The endpoint that counts the tokens of messages has the same checks. They refuse values that crash engines, a request
for another modality than text, and fields that only `/v1/chat/completions` reads. If the model cannot write text, they
refuse every request. The metrics count the requests that these checks or vLLM refuse.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response

from vllm_omni_ext.errors import OmniError, RequestError
from vllm_omni_ext.modalities.base import TEXT
from vllm_omni_ext.serving.chat import METRICS
from vllm_omni_ext.serving.limits.validation import client_has_left, count_refusal, validate_json_values
from vllm_omni_ext.serving.options import CHUNKS, LIST, MODALITIES, read_modalities
from vllm_omni_ext.serving.responses import as_vllm_error
from vllm_omni_ext.serving.served import ServedModel

CHAT = "/v1/chat/completions"
ANTHROPIC = "anthropic_serving_messages"
"""Name of the handler whose routes answer every exception themselves; those of other handlers are counted elsewhere."""

TEXT_HANDLERS = (
    ("openai_serving_completion", "create_completion", "/v1/completions"),
    ("openai_serving_responses", "create_responses", "/v1/responses"),
    (ANTHROPIC, "create_messages", "/v1/messages"),
    (ANTHROPIC, "count_tokens", "/v1/messages/count_tokens"),
    ("openai_serving_chat_batch", "create_batch_chat_completion", f"{CHAT}/batch"),
)
"""(name of vLLM's handler in `app.state`, name of the method to which checks are added, route)."""


def install(app: FastAPI, model: ServedModel) -> None:
    """Replace the methods of vLLM's handlers by methods that check the request first; missing handlers are skipped."""
    for name, method, route in TEXT_HANDLERS:
        handler: Any = getattr(app.state, name)
        if handler is not None:
            stock = getattr(handler, method)
            if name == ANTHROPIC:
                stock = _counted(stock, model)
            setattr(handler, method, _checked(handler, stock, model, route))


def _counted(stock: Callable[..., Any], model: ServedModel) -> Callable[..., Any]:
    """Return a method of the handler `ANTHROPIC` whose errors have a status, and are counted if they are refusals."""

    async def counted(*args: Any, **kwargs: Any) -> Any:
        try:
            try:
                return await stock(*args, **kwargs)
            except OmniError as error:
                raise as_vllm_error(error) from error
        except Exception as error:
            count_refusal(model.omni.observer, create_error_response(error).error.code, error)
            raise

    return counted


def _checked(handler: Any, stock: Callable[..., Any], model: ServedModel, route: str) -> Callable[..., Any]:
    async def checked(request: Any, raw_request: Request, *args: Any, **kwargs: Any) -> Any:
        try:
            validate_json_values(request)
            refuse_others(await _others(request, raw_request), model, route)
        except RequestError as error:
            model.omni.observer.refused(error)
            return handler.create_error_response(as_vllm_error(error))
        answer = await stock(request, raw_request, *args, **kwargs)
        if isinstance(answer, ErrorResponse) and not client_has_left():
            count_refusal(model.omni.observer, answer.error.code)
        return answer

    return checked


async def _others(request: Any, raw_request: Request) -> dict[str, Any]:
    """Return the fields of the body that are not in the request's type; Anthropic's types drop them."""
    if request.model_extra is not None:
        return dict(request.model_extra)
    return {name: value for name, value in (await raw_request.json()).items() if name not in type(request).model_fields}


def refuse_others(body: dict[str, Any], model: ServedModel, route: str) -> None:
    """Raise RequestError if the model cannot write text, or the body has a field that only chat requests may have.

    Args:
        body: fields of the request that vLLM does not read.
        route: path of the endpoint, for errors.
    """
    others = [name for name in model.capabilities.modalities if name != TEXT]
    if TEXT not in model.capabilities.modalities:
        message = f"model: it has no text; {CHAT} answers with {', '.join(others)}"
        raise RequestError(message, parameter="model")
    instead = f"{route} answers text only; {CHAT} answers with"
    requested = body.get(MODALITIES)
    if requested is not None:
        more = [name for name in read_modalities(requested, model.capabilities) if name != TEXT]
        if more:
            raise RequestError(f"{MODALITIES}: {instead} {', '.join(more)}", parameter=MODALITIES)
    for name in others:
        for field in model.modalities[name].body_fields:
            if body.get(field) is not None:
                raise RequestError(f"{field}: {instead} {name}", parameter=field)
    stages = [stage.model_stage for stage in model.omni.plan.model_stages()]
    for field in (*stages, LIST, CHUNKS, METRICS, *model.fields.names):
        if body.get(field) is not None:
            raise RequestError(f"{field}: {route} does not read it; use {CHAT}", parameter=field)
