"""Adds checks to vLLM's endpoints that return only text: completions, responses, messages, and batches of chats.

They refuse values that crash engines, a request for another modality than text, and fields that only
`/v1/chat/completions` reads. If the model cannot write text, they refuse every request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request

from vllm_omni_ext.errors import RequestError
from vllm_omni_ext.modalities.base import TEXT
from vllm_omni_ext.serving.chat import METRICS
from vllm_omni_ext.serving.limits.validation import validate_json_values
from vllm_omni_ext.serving.options import CHUNKS, LIST, MODALITIES, read_modalities
from vllm_omni_ext.serving.responses import as_vllm_error
from vllm_omni_ext.serving.served import ServedModel

CHAT = "/v1/chat/completions"
TEXT_HANDLERS = {
    "openai_serving_completion": ("create_completion", "/v1/completions"),
    "openai_serving_responses": ("create_responses", "/v1/responses"),
    "anthropic_serving_messages": ("create_messages", "/v1/messages"),
    "openai_serving_chat_batch": ("create_batch_chat_completion", f"{CHAT}/batch"),
}
"""(name of the method to which checks are added, route), by the name of vLLM's handler in `app.state`."""


def install(app: FastAPI, model: ServedModel) -> None:
    """Replace the methods of vLLM's handlers by methods that check the request first; missing handlers are skipped."""
    for name, (method, route) in TEXT_HANDLERS.items():
        handler: Any = getattr(app.state, name)
        if handler is not None:
            setattr(handler, method, _checked(handler, getattr(handler, method), model, route))


def _checked(handler: Any, stock: Callable[..., Any], model: ServedModel, route: str) -> Callable[..., Any]:
    async def checked(request: Any, raw_request: Request, *args: Any, **kwargs: Any) -> Any:
        try:
            validate_json_values(request)
            refuse_others(await _others(request, raw_request), model, route)
        except RequestError as error:
            model.omni.observer.refused(error)
            return handler.create_error_response(as_vllm_error(error))
        return await stock(request, raw_request, *args, **kwargs)

    return checked


async def _others(request: Any, raw_request: Request) -> dict[str, Any]:
    """Return the fields of the body that are not in the request's type; the type of `/v1/messages` drops them."""
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
