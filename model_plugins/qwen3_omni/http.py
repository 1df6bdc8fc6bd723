"""Qwen3-Omni over HTTP: chat and `/v1/audio/speech`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vllm_omni_ext.errors import RequestError
from vllm_omni_ext.model_plugins.qwen3_omni.flow import TALKER
from vllm_omni_ext.model_plugins.qwen3_omni.read_aloud import rendered
from vllm_omni_ext.model_plugins.qwen3_omni.runtime import SAMPLE_RATE_HZ
from vllm_omni_ext.plugins.http import SPEECH, HttpSurface, OmniServer
from vllm_omni_ext.plugins.runtime import Rendered, RequestOptions

ONLY_SPEED = 1.0
ANY_LANGUAGE = "auto"

REFUSED = {
    "instructions": "the talker follows no instructions; ask for the manner of speaking in a chat request",
    "ref_audio": "the voices are the checkpoint's own; see /v1/audio/voices",
    "ref_text": "the voices are the checkpoint's own; see /v1/audio/voices",
}
"""Fields of other servers that would change the sound, and the reasons why they are refused."""


class Qwen3OmniHttp(HttpSurface):
    """Chat and speech."""

    apis = (SPEECH,)
    speech_stage = TALKER

    async def speech(self, body: Any, options: RequestOptions, server: OmniServer) -> Rendered:
        """Turn a text into a request to read it out.

        Raises:
            RequestError: the text is empty, or the body contains a value that the talker cannot follow.
        """
        refuse_others(body)
        found = await rendered(body.input, server)
        return replace(found, input_tokens=len(found.data.reply))


def refuse_others(body: Any) -> None:
    """Refuse fields that would change the sound; RequestError contains the field's name."""
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
