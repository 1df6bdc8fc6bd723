"""Handler of `/v1/audio/speech` and `/v1/images/*`, whose requests bypass the frontend (the stage that writes text)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, ClassVar, TypeVar

from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from vllm.entrypoints.generate.base.serving import GenerateBaseServing

from vllm_omni_ext.errors import OmniError, RequestError
from vllm_omni_ext.orchestrator.answers import with_first
from vllm_omni_ext.serving.responses import DONE, EVENT_STREAM, as_vllm_error, named_event, refusal
from vllm_omni_ext.serving.served import ServedModel

Chunk = TypeVar("Chunk")


class DirectAnswer(ABC):
    """A checked request of `/v1/audio/speech` or `/v1/images/*`: starts the request, and writes its answer.

    Each of these APIs has a subclass, e.g. `ImageAnswer`. `DirectServing` calls its methods.
    """

    media_type: str | None
    """MIME type of a streamed answer; None: the answer is sent as a whole."""
    error_event: ClassVar[str]
    """Name of the server-sent event that reports a failure after the stream has started."""

    @abstractmethod
    def start(self, model: ServedModel, request_id: str) -> AsyncGenerator[Any, None]:
        """Start the request, and return a generator of its output chunks."""

    @abstractmethod
    async def whole(self, chunks: AsyncGenerator[Any, None]) -> Response:
        """Return the HTTP response with the whole answer. Closes `chunks`."""

    @abstractmethod
    def stream(self, chunks: AsyncGenerator[Any, None]) -> AsyncGenerator[str | bytes, None]:
        """Yield the pieces of the HTTP body of a streamed answer. Closes `chunks`."""


async def only(kind: type[Chunk], source: AsyncGenerator[Any, None]) -> AsyncGenerator[Chunk, None]:
    """Yield the chunks of `source` that are instances of `kind`. Closes `source`."""
    async with aclosing(source):
        async for chunk in source:
            if isinstance(chunk, kind):
                yield chunk


class DirectServing(GenerateBaseServing):
    """HTTP handler that runs `DirectAnswer`s: starts the request, sends the response, and converts errors to vLLM's.

    Args:
        stock: further arguments of vLLM's `GenerateBaseServing`.
    """

    def __init__(self, model: ServedModel, **stock: Any) -> None:
        super().__init__(engine_client=model.omni, **stock)
        self.model = model

    async def check_model(self, request: Any) -> Response | None:
        """Return the error response if the request's `model` is not served; None if it is."""
        unknown = await self._check_model(request)
        return None if unknown is None else refusal(unknown)

    def refuse_adapter(self, name: str | None, *routes: str) -> None:
        """Refuse a LoRA adapter: requests of this handler are sent to stages without adapter.

        Args:
            name: the request's `model`.
            routes: keys in `Capabilities.routes` of the stages that requests of the API may need. Where none of them is
                the frontend, nothing is refused, as only the frontend has adapters.

        Raises:
            RequestError: `name` is the name of an adapter, and a route needs the frontend.
        """
        frontend = self.model.omni.plan.frontend().model_stage
        needed = {stage for route in routes for stage in self.model.capabilities.routes.get(route, ())}
        if name in self.models.lora_requests and frontend in needed:
            raise RequestError(f"model: '{name}' is an adapter, which this API does not use", parameter="model")

    async def respond(self, answer: DirectAnswer, raw_request: Request, prefix: str) -> Response:
        """Start a request and return its response. The request id begins with `prefix`.

        Raises:
            VLLMError: the request was refused, or failed before the first byte of its answer.
        """
        self._preflight()
        chunks = answer.start(self.model, f"{prefix}-{self._base_request_id(raw_request)}")
        try:
            if answer.media_type is None:
                return await answer.whole(chunks)
            first = await anext(chunks)  # an error before the first chunk still gets its own HTTP status
        except OmniError as err:
            raise as_vllm_error(err) from err
        parts = answer.stream(with_first(first, chunks))
        if answer.media_type == EVENT_STREAM:  # in other streams, a failure closes the connection
            parts = self._with_error_event(parts, answer.error_event)
        return StreamingResponse(parts, media_type=answer.media_type)

    async def _with_error_event(self, parts: AsyncGenerator[Any, None], name: str) -> AsyncGenerator[Any, None]:
        async with aclosing(parts):
            try:
                async for part in parts:
                    yield part
            except OmniError as err:
                yield named_event(name, error=self.create_error_response(as_vllm_error(err)).error.model_dump())
                yield DONE
