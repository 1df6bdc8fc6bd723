"""HTTP interface of Qwen3-Omni and Qwen2.5-Omni: chat, `/v1/audio/speech` and `/v1/realtime`."""

from __future__ import annotations

from typing import Any

from vllm_omni_ext.errors import RequestError
from vllm_omni_ext.model_plugins.qwen_omni.requests import MOST_SPEECH_TOKENS, SAMPLE_RATE_HZ, ReadAloud, too_long
from vllm_omni_ext.plugins.http import REALTIME, SPEECH, HttpSurface, OmniServer
from vllm_omni_ext.plugins.runtime import Rendered, RequestOptions

CHARACTERS = 4096
"""Length of the pieces, in characters, in which `_refuse_long` tokenizes a long text."""

CERTAIN = 2
"""`_refuse_long` rejects a text when its pieces have more tokens than this factor times the limit. The whole text, with
tokens across the borders of the pieces, then exceeds the limit too."""

ONLY_SPEED = 1.0
ANY_LANGUAGE = "auto"

REFUSED = {
    "instructions": "the talker follows no instructions; ask for the manner of speaking in a chat request",
    "ref_audio": "the voices are the checkpoint's own; see /v1/audio/voices",
    "ref_text": "the voices are the checkpoint's own; see /v1/audio/voices",
}
"""Fields of `/v1/audio/speech` that would change the sound and are rejected, with the reason for the error message."""


class SpeakingHttp(HttpSurface):
    """Base class of both families' `HttpSurface`: serves `/v1/audio/speech` and `/v1/realtime` in addition to chat."""

    apis = (SPEECH, REALTIME)
    speech_stage = "talker"
    speech_fields = ("speed", "sample_rate", "language", *REFUSED)
    opening: str
    """Conversation before a text that is read out, in the chat format, up to the assistant header; a subclass sets it.
    """

    async def speech(self, body: Any, options: RequestOptions, server: OmniServer) -> Rendered:
        """Return the request for a body of `/v1/audio/speech`; its `data` is a `ReadAloud`.

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
    """Return the request that reads a text out word for word; its `data` is a `ReadAloud`.

    Chat-format marks in the text are tokenized as plain text.

    Args:
        opening: the conversation before the text, in the chat format, up to the assistant header.

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
    """Tokenize a long text in pieces; raise RequestError when they have more than `CERTAIN` times the allowed tokens.

    So the rest of a much too long text is not tokenized. `ModelRuntime.plan` rejects the other texts that are too long.
    """
    tokens, most = 0, server.capabilities.card[MOST_SPEECH_TOKENS]
    for start in range(0, max(0, len(text) - CHARACTERS), CHARACTERS):
        tokens += len(await server.tokenize(text[start : start + CHARACTERS], special=False))
        if tokens > CERTAIN * most:
            raise too_long(f"{len(text)} characters", most)
