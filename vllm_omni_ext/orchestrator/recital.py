"""A text read out word for word: the conversation's reply is given, so the text stage is left out."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from vllm_omni_ext.errors import RequestError
from vllm_omni_ext.orchestrator.lengths import needed
from vllm_omni_ext.orchestrator.orchestrator import Orchestrator
from vllm_omni_ext.orchestrator.requests import OmniOptions
from vllm_omni_ext.outputs import AudioOutput

T = TypeVar("T")


class Recital:
    """One text on its way to sound. `tokens` counts those of the text."""

    def __init__(
        self,
        orchestrator: Orchestrator,
        *,
        prompt: Sequence[int],
        reply: Sequence[int],
        options: OmniOptions,
        request_id: str,
    ) -> None:
        self.tokens = len(reply)
        self._orchestrator = orchestrator
        self._prompt, self._reply, self._options = prompt, reply, options
        self._external_id = request_id
        self._request_id = f"{request_id}-{uuid.uuid4().hex[:8]}"

    async def pieces(self) -> AsyncGenerator[AudioOutput, None]:
        """The sound. Closing the generator ends the request in every stage.

        Raises:
            StageUnavailable: a stage has lost its last replica.
            RequestFailed: a stage could not finish the request.
        """
        sink: asyncio.Queue[Any] = asyncio.Queue()
        try:
            await self._orchestrator.recite(
                self._request_id,
                external_id=self._external_id,
                prompt=self._prompt,
                reply=self._reply,
                options=self._options,
                sink=sink,
            )
            finished = False
            while not finished:
                item = await sink.get()
                if isinstance(item, BaseException):
                    raise item
                finished = item.finished
                yield item
        finally:
            await self._orchestrator.abort([self._request_id])


async def make_recital(
    orchestrator: Orchestrator, renderer: Any, text: str, options: OmniOptions, request_id: str
) -> Recital:
    """Check a text and cut it into tokens; marks of the chat format in it are read as the characters they are.

    Args:
        renderer: vLLM's, for its tokenizer and the thread that may use it.

    Raises:
        RequestError: there is nothing to read, or more than the stages can take.
        StageUnavailable: a stage has no live replica.
    """
    if not text.strip():
        raise RequestError("input: there is nothing to read out", parameter="input")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError("input: must be text; it has half of a surrogate pair in it", parameter="input") from error
    tokenizer = renderer.get_tokenizer()
    opening = orchestrator.plugin.recital_prompt
    prompt = await _in_thread(renderer, partial(tokenizer.encode, opening, add_special_tokens=False))
    frames = min(orchestrator.room(prompt, options).values())
    counted = partial(needed, tokenizer, text, frames)
    if len(text) > frames * tokenizer.max_chars_per_token or await _in_thread(renderer, counted) < len(text):
        raise _too_long(f"{len(text)} characters", frames)
    plain = partial(tokenizer.encode, text, add_special_tokens=False, split_special_tokens=True)
    reply = await _in_thread(renderer, plain)
    if len(reply) > frames:
        raise _too_long(f"{len(reply)} tokens", frames)
    return Recital(orchestrator, prompt=prompt, reply=reply, options=options, request_id=request_id)


async def _in_thread(renderer: Any, function: Callable[[], T]) -> T:
    """Where vLLM cuts its prompts: its tokenizer must not be used by two threads at once."""
    return await asyncio.get_running_loop().run_in_executor(renderer._executor, function)


def _too_long(length: str, frames: int) -> RequestError:
    return RequestError(
        f"input: {length} are too many: every token takes a frame at least, and there is room for {frames}; "
        "send the text in several requests",
        parameter="input",
    )
