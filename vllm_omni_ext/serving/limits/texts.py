"""Refuses texts that exceed the context length early: tokenization stops when the limit is exceeded.

vLLM refuses a text without tokenization only if it has more characters than the context length times the length of the
longest token. All other texts are tokenized completely. The longest token of a vocabulary has 100 characters or more,
so texts of megabytes pass vLLM's first check.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from vllm.entrypoints.serve.exception_handling.handlers.vllm_error import vllm_error_handler
from vllm.exceptions import VLLMValidationError
from vllm.renderers import TokenizeParams
from vllm.utils.async_utils import make_async

from vllm_omni_ext.errors import RequestError
from vllm_omni_ext.omni import AsyncOmni
from vllm_omni_ext.orchestrator.lengths import needed
from vllm_omni_ext.serving.responses import BadRequest

LENGTHS = ("input_text", "input_tokens")
"""Parameter names in vLLM's errors about too long prompts; they do not name the field of the request."""

PROMPT_FIELDS = ("messages", "prompt", "input")
"""Request fields that contain a prompt; a body has only one of them."""


def install(app: FastAPI, renderer: Any) -> None:
    """Limit tokenization and the tokens of `/detokenize`; make errors about long prompts name the request's field."""
    renderer._tokenize_prompt_async = make_async(partial(_tokenize, renderer), executor=renderer._executor)
    app.add_exception_handler(VLLMValidationError, _handler)  # type: ignore[arg-type]
    tokenization, most = app.state.serving_tokenization, renderer.model_config.max_model_len
    stock = tokenization.create_detokenize

    async def create_detokenize(request: Any, raw_request: Request) -> Any:
        if (count := len(request.tokens)) > most:
            raise BadRequest(f"tokens: at most {most} fit into the context, got {count}", parameter="tokens")
        return await stock(request, raw_request)

    tokenization.create_detokenize = create_detokenize


def _tokenize(renderer: Any, prompt: dict[str, Any], params: TokenizeParams) -> Any:
    """Replaces `BaseRenderer._tokenize_prompt`. Without a limit in `params` (`/tokenize`), the context is the limit.

    Raises:
        VLLMValidationError: the text has more tokens than the limit, and `params` do not allow truncation.
    """
    text, tokenizer = prompt["prompt"], renderer.get_tokenizer()
    truncation = params.truncate_prompt_tokens
    if truncation is not None and truncation < 0:
        truncation = params.max_truncation_tokens
    most = renderer.model_config.max_model_len if params.max_input_tokens is None else params.max_input_tokens
    limit = most if truncation is None else truncation
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


async def _handler(request: Request, error: VLLMValidationError) -> Response:
    body = getattr(request, "_json", None)  # Starlette's cache of `request.json()`; missing if not called
    if error.parameter in LENGTHS and isinstance(body, dict):
        field = next((name for name in PROMPT_FIELDS if name in body), error.parameter)
        error = BadRequest(str(error.args[0]), parameter=field)
    response: Response = await vllm_error_handler(request, error)
    return response


async def refuse_long(omni: AsyncOmni, name: str, text: str) -> None:
    """Raise RequestError if a text exceeds the frontend's context length, without tokenizing the whole text.

    Args:
        name: request field of the text.
    """
    most, tokenizer = omni.model_config.max_model_len, omni.renderer.get_tokenizer()
    if len(text) > (longest := most * tokenizer.max_chars_per_token):
        raise RequestError(f"{name}: at most {longest} characters fit, got {len(text)}", parameter=name)
    loop, executor = asyncio.get_running_loop(), omni.renderer._executor  # the tokenizer's only thread
    if await loop.run_in_executor(executor, needed, tokenizer, text, most) < len(text):
        raise RequestError(f"{name}: at most {most} tokens fit", parameter=name)
