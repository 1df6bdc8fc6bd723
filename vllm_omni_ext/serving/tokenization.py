"""Makes the refusal of long texts cheap: tokenization stops when a text is known to be too long.

vLLM refuses a text with more characters than context length times longest token, and tokenizes all other texts
completely. A longest token has a hundred characters or more, so texts of megabytes pass that first check.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from vllm.config import ModelConfig
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.handlers.vllm_error import vllm_error_handler
from vllm.entrypoints.serve.tokenize.protocol import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
    TokenizeRequest,
    TokenizeResponse,
)
from vllm.entrypoints.serve.tokenize.serving import ServingTokenization
from vllm.exceptions import VLLMValidationError
from vllm.renderers import TokenizeParams
from vllm.utils.async_utils import make_async

from vllm_omni_ext.orchestrator.lengths import needed
from vllm_omni_ext.serving.failures import BadRequest

LENGTHS = ("input_text", "input_tokens")
"""vLLM's parameter names for a prompt that is too long, in any field."""

PROMPT_FIELDS = {
    "/v1/chat/completions": "messages",
    "/v1/completions": "prompt",
    "/v1/messages": "messages",
    "/v1/responses": "input",
}


def bound(renderer: Any) -> None:
    """Make a vLLM renderer stop early; it still tokenizes in its own thread."""
    renderer._tokenize_prompt_async = make_async(partial(_tokenize, renderer), executor=renderer._executor)


def _tokenize(renderer: Any, prompt: dict[str, Any], params: TokenizeParams) -> Any:
    """Replaces `BaseRenderer._tokenize_prompt`.

    Raises:
        VLLMValidationError: the text has more tokens than the context.
    """
    text, tokenizer = prompt["prompt"], renderer.get_tokenizer()
    truncation = params.truncate_prompt_tokens
    if truncation is not None and truncation < 0:
        truncation = params.max_truncation_tokens
    limit = params.max_input_tokens if truncation is None else truncation
    if limit is None:
        return renderer._tokenize_prompt(prompt, params)
    side = (params.truncation_side or tokenizer.truncation_side) if truncation is not None else "right"
    enough = needed(tokenizer, text, limit, from_end=side == "left")
    if enough == len(text):
        return renderer._tokenize_prompt(prompt, params)
    if truncation is None:
        raise VLLMValidationError(
            f"This model's maximum context length is {limit} tokens. However, the first {enough} of the {len(text)} "
            "characters of your prompt have more already. Please reduce the length of the input prompt.",
            parameter=LENGTHS[0],
        )
    cut = len(text) - enough if side == "left" else 0
    found = renderer._tokenize_prompt({**prompt, "prompt": text[cut : cut + enough]}, params)
    return {**renderer._apply_prompt_char_offset(found, cut), "prompt": text}


class _WithinContext:
    """A tokenization request with the length limit of a chat."""

    def build_tok_params(self, model_config: ModelConfig) -> TokenizeParams:
        """Return vLLM's parameters, with the limit."""
        stock: TokenizeParams = super().build_tok_params(model_config)  # type: ignore[misc]
        return replace(stock, max_total_tokens=model_config.max_model_len)


class _Completion(_WithinContext, TokenizeCompletionRequest):
    pass


class _Chat(_WithinContext, TokenizeChatRequest):
    pass


class BoundedTokenization(ServingTokenization):
    """`/tokenize` and `/detokenize` with the context length as their limit; vLLM has no limit there."""

    @classmethod
    def like(cls, stock: ServingTokenization) -> BoundedTokenization:
        """Return an instance with the settings of vLLM's."""
        return cls(
            stock.models,
            stock.online_renderer,
            chat_template=stock.chat_template,
            chat_template_content_format=stock.chat_template_content_format,
            default_chat_template_kwargs=stock.default_chat_template_kwargs,
            trust_request_chat_template=stock.trust_request_chat_template,
            request_logger=stock.request_logger,
        )

    async def create_tokenize(self, request: TokenizeRequest, raw_request: Request) -> TokenizeResponse | ErrorResponse:
        """Return the tokens of a text or of a conversation."""
        kind, field = (_Chat, "messages") if isinstance(request, TokenizeChatRequest) else (_Completion, "prompt")
        try:
            return await super().create_tokenize(kind.model_construct(**dict(request)), raw_request)
        except VLLMValidationError as error:
            raise _named(error, field) from error

    async def create_detokenize(
        self, request: DetokenizeRequest, raw_request: Request
    ) -> DetokenizeResponse | ErrorResponse:
        """Return the text of tokens."""
        most = self.model_config.max_model_len
        if len(request.tokens) > most:
            raise BadRequest(
                f"tokens: at most {most} fit into the context, got {len(request.tokens)}", parameter="tokens"
            )
        return await super().create_detokenize(request, raw_request)


def install(app: FastAPI, renderer: Any) -> None:
    """Bound the renderer that all handlers share and the two endpoints, and name the field in errors about length."""
    bound(renderer)
    app.state.serving_tokenization = BoundedTokenization.like(app.state.serving_tokenization)
    app.add_exception_handler(VLLMValidationError, _handler)  # type: ignore[arg-type]


async def _handler(request: Request, error: VLLMValidationError) -> Response:
    field = PROMPT_FIELDS.get(request.url.path.removeprefix(request.scope.get("root_path", "")))
    response: Response = await vllm_error_handler(request, error if field is None else _named(error, field))
    return response


def _named(error: VLLMValidationError, field: str) -> VLLMValidationError:
    """Return the same error; a prompt that is too long gets its field's name."""
    return BadRequest(str(error.args[0]), parameter=field) if error.parameter in LENGTHS else error
