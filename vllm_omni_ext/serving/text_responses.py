"""Endpoints that answer text alone.

`/v1/responses` refuses a request for anything else. Where the model has no text, all of them refuse.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

from vllm_omni_ext.errors import RequestError
from vllm_omni_ext.modalities.base import TEXT
from vllm_omni_ext.serving.failures import as_vllm_error
from vllm_omni_ext.serving.options import MODALITIES, read_modalities
from vllm_omni_ext.serving.served import ServedModel

TEXT_HANDLERS = ("openai_serving_completion", "openai_serving_responses", "anthropic_serving_messages")
"""Attributes of the application's state with the handlers of `/v1/completions`, `/v1/responses` and `/v1/messages`."""

INSTEAD = "/v1/responses answers text only; /v1/chat/completions answers with"


class Wrapped:
    """One of vLLM's handlers, some of whose requests are refused."""

    def __init__(self, stock: Any, model: ServedModel) -> None:
        self._stock = stock
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)

    def _refused(self, error: RequestError) -> Any:
        """Count a refusal; return the answer."""
        self._model.omni.observer.refused(error)
        return self._stock.create_error_response(as_vllm_error(error))


class TextResponses(Wrapped):
    """vLLM's handler of `/v1/responses`, behind a check of the requested modalities."""

    async def create_responses(self, request: ResponsesRequest, raw_request: Any = None) -> Any:
        """Answer a request, or return the error of `refuse_others`."""
        try:
            refuse_others(request.model_extra or {}, self._model)
        except RequestError as err:
            return self._refused(err)
        return await self._stock.create_responses(request, raw_request)


def refuse_others(body: dict[str, Any], model: ServedModel) -> None:
    """Refuse fields that request an answer that is not text.

    Args:
        body: the fields that are not vLLM's.

    Raises:
        RequestError: `modalities` has more than text, or a field belongs to another modality; named by the field.
    """
    others = [name for name in model.capabilities.modalities if name != TEXT]
    if body.get(MODALITIES) is not None:
        asked = [name for name in read_modalities(body[MODALITIES], model.capabilities) if name != TEXT]
        if asked:
            raise RequestError(f"{MODALITIES}: {INSTEAD} {', '.join(asked)}", parameter=MODALITIES)
    for name in others:
        for field in model.modalities[name].body_fields:
            if body.get(field) is not None:
                raise RequestError(f"{field}: {INSTEAD} {name}", parameter=field)


class NoText(Wrapped):
    """Refuses all requests of a handler, because the model has no text."""

    async def refuse(self, *_: Any) -> Any:
        """Return the error."""
        others = ", ".join(self._model.capabilities.modalities)
        text = f"model: it has no text; /v1/chat/completions answers with {others}"
        return self._refused(RequestError(text, parameter="model"))

    create_completion = create_responses = create_messages = refuse


def install(app: FastAPI, model: ServedModel) -> None:
    """Put the checks before vLLM's handlers, where there are any."""
    if TEXT not in model.capabilities.modalities:
        for name in TEXT_HANDLERS:
            if (stock := getattr(app.state, name)) is not None:
                setattr(app.state, name, NoText(stock, model))
        return
    if app.state.openai_serving_responses is not None:
        app.state.openai_serving_responses = TextResponses(app.state.openai_serving_responses, model)
