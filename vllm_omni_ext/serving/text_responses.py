"""Adds checks to vLLM's endpoints that return only text: completions, responses, and Anthropic's messages.

`/v1/responses` refuses a request for another modality. If the model cannot write text, all three refuse every request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI

from vllm_omni_ext.errors import RequestError
from vllm_omni_ext.modalities.base import TEXT
from vllm_omni_ext.serving.options import MODALITIES, read_modalities
from vllm_omni_ext.serving.responses import as_vllm_error
from vllm_omni_ext.serving.served import ServedModel

TEXT_HANDLERS = {
    "openai_serving_completion": "create_completion",
    "openai_serving_responses": "create_responses",
    "anthropic_serving_messages": "create_messages",
}
"""Names of the methods to which checks are added, by the name of vLLM's handler in `app.state`."""

INSTEAD = "/v1/responses answers text only; /v1/chat/completions answers with"


def install(app: FastAPI, model: ServedModel) -> None:
    """Replace the methods of vLLM's handlers by methods that check the request first; missing handlers are skipped."""
    text = TEXT in model.capabilities.modalities
    for name, method in TEXT_HANDLERS.items():
        handler: Any = getattr(app.state, name)
        if handler is not None and (not text or method == "create_responses"):
            setattr(handler, method, _checked(handler, getattr(handler, method), model))


def _checked(handler: Any, stock: Callable[..., Any], model: ServedModel) -> Callable[..., Any]:
    async def checked(request: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            refuse_others(request.model_extra or {}, model)
        except RequestError as error:
            model.omni.observer.refused(error)
            return handler.create_error_response(as_vllm_error(error))
        return await stock(request, *args, **kwargs)

    return checked


def refuse_others(body: dict[str, Any], model: ServedModel) -> None:
    """Raise RequestError if the model cannot write text, or the body requests another modality than text.

    Args:
        body: fields of the request that vLLM does not read.
    """
    others = [name for name in model.capabilities.modalities if name != TEXT]
    if TEXT not in model.capabilities.modalities:
        message = f"model: it has no text; /v1/chat/completions answers with {', '.join(others)}"
        raise RequestError(message, parameter="model")
    requested = body.get(MODALITIES)
    if requested is not None:
        more = [name for name in read_modalities(requested, model.capabilities) if name != TEXT]
        if more:
            raise RequestError(f"{MODALITIES}: {INSTEAD} {', '.join(more)}", parameter=MODALITIES)
    for name in others:
        for field in model.modalities[name].body_fields:
            if body.get(field) is not None:
                raise RequestError(f"{field}: {INSTEAD} {name}", parameter=field)
