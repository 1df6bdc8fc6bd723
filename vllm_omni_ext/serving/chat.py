"""`/v1/chat/completions` with sound. vLLM's handler does everything; sound is taken out before it and put in after."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from contextvars import ContextVar
from importlib.metadata import PackageNotFoundError
from typing import Any, TypeAlias

from fastapi import Request
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionResponse
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.serve.engine.protocol import ErrorResponse, PromptTokenUsageInfo
from vllm.exceptions import VLLMClientError, VLLMError, VLLMUnprocessableEntityError
from vllm.logger import init_logger

from vllm_omni_ext.errors import OmniError, RequestError
from vllm_omni_ext.omni import REQUEST_OPTIONS, AsyncOmni
from vllm_omni_ext.serving.failures import BadRequest, as_vllm_error, printable, with_vllm_errors
from vllm_omni_ext.serving.media import MediaNotFetched
from vllm_omni_ext.serving.options import Asked, read_request
from vllm_omni_ext.serving.spoken_reply import SpokenReply
from vllm_omni_ext.serving.spoken_stream import SpokenStream, with_text_events
from vllm_omni_ext.serving.turns import restore_spoken_turns

logger = init_logger(__name__)

Answer: TypeAlias = AsyncGenerator[str, None] | ChatCompletionResponse | ErrorResponse

MESSAGES = "messages"

NO_RESAMPLER = "the sound's sample rate is not the model's, and to change it the server needs PyAV (pip install av)"
"""What is meant when vLLM looks for its own package, to say what to install, under a name that it may not have."""

_ASKED: ContextVar[Asked] = ContextVar("omni_chat_asked")
"""What the request that is being handled asks for; read by the hooks, which vLLM calls in the same context."""


class OmniServingChat(OpenAIServingChat):
    """Chat whose answers may be text, sound or both. A request for text alone goes through vLLM unchanged."""

    engine_client: AsyncOmni

    async def create_chat_completion(
        self, request: ChatCompletionRequest, raw_request: Request | None = None
    ) -> Answer:
        """Answer a chat request."""
        omni = self.engine_client
        try:
            asked = read_request(request, omni.plugin, omni.plan)
            restore_spoken_turns(request.messages)
        except RequestError as err:
            return self.create_error_response(as_vllm_error(err))
        wishes, options = _ASKED.set(asked), REQUEST_OPTIONS.set(asked.options)
        try:
            return await super().create_chat_completion(request, raw_request)
        except OmniError as err:  # known before the first byte
            return self.create_error_response(as_vllm_error(err))
        finally:
            REQUEST_OPTIONS.reset(options)
            _ASKED.reset(wishes)

    async def render_chat_request(self, request: ChatCompletionRequest) -> Any:
        """vLLM's step from a request to a prompt; what is wrong with its messages is the client's to know."""
        try:
            return await super().render_chat_request(request)
        except MediaNotFetched as err:
            raise BadRequest(f"{MESSAGES}: {err}", parameter=MESSAGES) from err
        except VLLMUnprocessableEntityError as err:
            raise BadRequest(str(err.args[0]), parameter=MESSAGES) from err
        except VLLMError as err:
            if not isinstance(err, VLLMClientError) or getattr(err, "parameter", None):
                raise
            raise BadRequest(str(err), parameter=MESSAGES) from err
        except Exception as err:  # media are fetched and decoded here, by libraries with errors of all kinds
            if all(isinstance(message.get("content"), str) for message in request.messages):
                raise
            logger.warning("A request's media could not be read", exc_info=True)
            said = NO_RESAMPLER if isinstance(err, PackageNotFoundError) else printable(str(err) or type(err).__name__)
            raise BadRequest(f"messages: a medium could not be read: {said}", parameter=MESSAGES) from err

    async def chat_completion_full_generator(
        self, request: ChatCompletionRequest, result_generator: Any, *args: Any, **kwargs: Any
    ) -> ErrorResponse | ChatCompletionResponse:
        """vLLM's hook: the whole answer."""
        asked = _ASKED.get()
        source = with_vllm_errors(result_generator)
        heard = _prompt_audio(kwargs)
        if asked.options.text_only:
            async with aclosing(source):
                response = await super().chat_completion_full_generator(request, source, *args, **kwargs)
            return _with_prompt_audio(response, heard)
        reply = SpokenReply(asked, self.engine_client.plugin.sample_rate)
        async with aclosing(reply.text_of(source)) as text:
            response = await super().chat_completion_full_generator(request, text, *args, **kwargs)
        if isinstance(response, ChatCompletionResponse):
            await reply.complete(response)
        return _with_prompt_audio(response, heard)

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
        asked = _ASKED.get()
        source = with_vllm_errors(result_generator)
        stock = super().chat_completion_stream_generator
        if asked.options.text_only:
            events = stock(request, source, request_id, model_name, *args, **kwargs)
            return with_text_events(events, _prompt_audio(kwargs))
        stream = SpokenStream(
            asked,
            self.engine_client.plugin.sample_rate,
            request_id=request_id,
            model=model_name,
            prompt_audio=_prompt_audio(kwargs),
        )
        text = stream.text_of(source)
        return stream.events(stock(request, text, request_id, model_name, *args, **kwargs), text)


def _prompt_audio(hook_arguments: Mapping[str, Any]) -> int:
    """Tokens of the prompt that are sound, from what vLLM gives its hooks."""
    return int((hook_arguments.get("mm_token_counts") or {}).get("audio", 0))


def _with_prompt_audio(
    response: ErrorResponse | ChatCompletionResponse, tokens: int
) -> ErrorResponse | ChatCompletionResponse:
    if tokens and isinstance(response, ChatCompletionResponse):
        details = response.usage.prompt_tokens_details or PromptTokenUsageInfo()
        details.audio_tokens = tokens  # type: ignore[attr-defined]  # the model takes extra fields
        response.usage.prompt_tokens_details = details
    return response
