"""Sends the items of a suite to a server, through the `openai` client."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.evaluation.suite import Item, Suite


@dataclass(frozen=True)
class Answer:
    """The answer of a server to an item.

    Attributes:
        text: of the message, or the transcript of its sound.
        sound: a WAV file, if the request is for sound.
        error: the reason of a missing answer.
    """

    text: str = ""
    sound: bytes = b""
    error: str | None = None


async def ask_all(
    url: str, key: str, model: str | None, suite: Suite, at_once: int, done: Callable[[], None]
) -> tuple[str, dict[str, Answer]]:
    """Send a request for every item, `at_once` at a time.

    Args:
        url: ends with `/v1`.
        model: name of the model; None: the only one that the server has.
        done: called after each answer.

    Returns:
        the model's name, and the answers by item.

    Raises:
        ConfigError: the server does not answer, or has several models and none was named.
    """
    import openai

    async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
        name, turn = model or await _only_model(client, url), asyncio.Semaphore(at_once)

        async def one(item: Item) -> tuple[str, Answer]:
            async with turn:
                answer = await _ask(client, name, suite, item)
            done()
            return item.id, answer

        return name, dict(await asyncio.gather(*map(one, suite.items)))


async def _only_model(client: Any, url: str) -> str:
    import openai

    try:
        models = [each.id async for each in client.models.list()]
    except openai.APIError as err:
        raise ConfigError(f"{url}: does not answer: {err}") from None
    if len(models) != 1:
        raise ConfigError(f"{url}: has the models {', '.join(models)}; choose one with --model")
    return str(models[0])


async def _ask(client: Any, model: str, suite: Suite, item: Item) -> Answer:
    import openai

    # The client refuses unknown arguments, so all fields go into `extra_body`.
    fields = {"temperature": 0, **suite.options, **item.options}
    try:
        reply = await client.chat.completions.create(model=model, messages=suite.messages(item), extra_body=fields)
    except (openai.OpenAIError, OSError) as err:  # OSError: a file of the suite is gone
        return Answer(error=str(err))
    message = reply.choices[0].message
    if message.audio is None:
        return Answer(message.content or "")
    return Answer(message.audio.transcript or message.content or "", base64.b64decode(message.audio.data))
