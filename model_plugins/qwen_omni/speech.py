"""HTTP interface of a family that speaks: chat, `/v1/audio/speech` and `/v1/realtime`."""

from __future__ import annotations

from typing import Any

from vllm_omni_ext.errors import RequestError
from vllm_omni_ext.model_plugins.qwen_omni.requests import MOST_SPEECH_TOKENS, SAMPLE_RATE_HZ, ReadAloud, too_long
from vllm_omni_ext.plugins.http import REALTIME, SPEECH, HttpSurface, OmniServer
from vllm_omni_ext.plugins.runtime import Rendered, RequestOptions

CHARACTERS = 4096
"""A longer text is tokenized in pieces of this many characters, until its length certainly exceeds the limit."""

CERTAIN = 2
"""Tokenization of pieces stops when they have more than this factor times the limit in tokens. Tokens across the
borders of pieces could not reduce the number below the limit."""

ONLY_SPEED = 1.0
ANY_LANGUAGE = "auto"

REFUSED = {
    "instructions": "the talker follows no instructions; ask for the manner of speaking in a chat request",
    "ref_audio": "the voices are the checkpoint's own; see /v1/audio/voices",
    "ref_text": "the voices are the checkpoint's own; see /v1/audio/voices",
}
"""Request fields of other servers that would change the sound, and the reason why each is rejected."""


class SpeakingHttp(HttpSurface):
    """Serves speech requests and realtime sessions in addition to chat. A subclass has the conversation `opening`."""

    apis = (SPEECH, REALTIME)
    speech_stage = "talker"
    speech_fields = ("speed", "sample_rate", "language", *REFUSED)
    opening: str
    """Prompt of a text that is read out, up to the assistant header."""

    async def speech(self, body: Any, options: RequestOptions, server: OmniServer) -> Rendered:
        """Return the request that reads the body's text out.

        Raises:
            RequestError: the text is empty or too long, or the body has a field that the talker does not support.
        """
        refuse_others(body)
        return await rendered(body.input, server, self.opening)


def refuse_others(body: Any) -> None:
    """Reject unsupported fields that would change the sound, with a RequestError that contains the field's name."""
    for name, why in REFUSED.items():
        if getattr(body, name):
            raise RequestError(f"{name}: is not available: {why}", parameter=name)
    if body.speed not in (None, ONLY_SPEED):
        raise RequestError(
            f"speed: only {ONLY_SPEED} is available, got {body.speed}; change the speed of the sound where it is "
            "played",
            parameter="speed",
        )
    if body.sample_rate not in (None, SAMPLE_RATE_HZ):
        raise RequestError(f"sample_rate: only {SAMPLE_RATE_HZ} is available", parameter="sample_rate")
    if body.language is not None and body.language.lower() != ANY_LANGUAGE:
        raise RequestError(
            f"language: is read from the text; leave it out or say '{ANY_LANGUAGE}'", parameter="language"
        )


async def rendered(text: str, server: OmniServer, opening: str) -> Rendered:
    """Return the request that reads a text out word for word. Chat-format marks in the text are plain characters.

    Args:
        opening: the conversation before the text.

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
    prompt = await server.tokenize(opening)
    reply = await server.tokenize(text, special=False)
    return Rendered(data=ReadAloud(prompt=prompt, reply=reply), input_tokens=len(reply))


async def _refuse_long(text: str, server: OmniServer) -> None:
    """Reject a much too long text before all of it is tokenized; `plan` rejects other long texts."""
    tokens, most = 0, server.capabilities.card[MOST_SPEECH_TOKENS]
    for start in range(0, max(0, len(text) - CHARACTERS), CHARACTERS):
        tokens += len(await server.tokenize(text[start : start + CHARACTERS], special=False))
        if tokens > CERTAIN * most:
            raise too_long(f"{len(text)} characters", most)
