"""Reads a text out word for word: a conversation with a given reply, without the thinker."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_omni_ext.errors import RequestError
from vllm_omni_ext.plugins.http import OmniServer
from vllm_omni_ext.plugins.runtime import Rendered

OPENING = "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"
"""The talker was trained on conversations: an empty user turn keeps their form without adding words."""

CHARACTERS = 4096
"""A longer text is tokenized in pieces of this many characters, until it is certainly too long."""

CERTAIN = 2
"""Tokenization stops when the pieces together have more than this many times the limit in tokens. Tokens that would
cross the borders between pieces cannot make up for that."""

MOST_SPEECH_TOKENS = "max_speech_tokens"
"""Entry of the model's card: length in tokens of the longest text that can be read out."""


@dataclass(frozen=True, kw_only=True)
class ReadAloud:
    """The content of `Rendered.data`.

    Attributes:
        prompt: ids of a conversation that ends before the reply.
        reply: ids of the text.
    """

    prompt: list[int]
    reply: list[int]


async def rendered(text: str, server: OmniServer) -> Rendered:
    """Check and tokenize a text; marks of the chat format in the text are plain characters.

    Raises:
        RequestError: the text is empty or too long.
    """
    if not text.strip():
        raise RequestError("input: there is nothing to read out", parameter="input")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError("input: must be text; it has half of a surrogate pair in it", parameter="input") from error
    await _refuse_long(text, server)
    prompt = await server.tokenize(OPENING)
    reply = await server.tokenize(text, special=False)
    return Rendered(data=ReadAloud(prompt=prompt, reply=reply))


async def _refuse_long(text: str, server: OmniServer) -> None:
    """Refuse a text that is certainly too long before all of it is tokenized; the plan refuses the others."""
    tokens, most = 0, server.capabilities.card[MOST_SPEECH_TOKENS]
    for start in range(0, max(0, len(text) - CHARACTERS), CHARACTERS):
        tokens += len(await server.tokenize(text[start : start + CHARACTERS], special=False))
        if tokens > CERTAIN * most:
            raise too_long(f"{len(text)} characters", most)


def too_long(length: str, frames: int) -> RequestError:
    """Return the error for a text that is too long."""
    return RequestError(
        f"input: {length} are too many: every token takes a frame at least, and there is room for {frames}; "
        "send the text in several requests",
        parameter="input",
    )
