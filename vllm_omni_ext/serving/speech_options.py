"""What a speech request asks for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from pydantic import Field
from vllm.entrypoints.serve.engine.protocol import OpenAIBaseModel

from vllm_omni_ext.errors import RequestError
from vllm_omni_ext.orchestrator.requests import OmniOptions, RequestPlugin
from vllm_omni_ext.serving.encoding import SPEECH_FORMATS, WAV, Encoding, streaming
from vllm_omni_ext.serving.options import VOICE_FIELDS, check_options, choice, read_chunks, voice_of
from vllm_omni_ext.serving.stage_sampling import LARGEST_INTEGER, read_sampling
from vllm_omni_ext.serving.values import refuse_absurd_values
from vllm_omni_ext.topology.shape import Plan

SSE, AUDIO = "sse", "audio"
ONLY_SPEED = 1.0
ANY_LANGUAGE = "auto"

REFUSED = {
    "instructions": "the talker follows no instructions; ask for the manner of speaking in a chat request",
    "ref_audio": "the voices are the checkpoint's own; see /v1/audio/voices",
    "ref_text": "the voices are the checkpoint's own; see /v1/audio/voices",
}
"""Fields of other servers that would change the sound, and why they cannot here."""


class SpeechRequest(OpenAIBaseModel):
    """Body of `/v1/audio/speech`: OpenAI's fields, and those of vllm-omni that make sense here."""

    input: str = Field(description="The text, spoken word for word.")
    model: str | None = None
    voice: Any = Field(None, description="A speaker of the checkpoint; see /v1/audio/voices.")
    speaker: Any = Field(None, description="Another name of `voice`.")
    response_format: str = Field(WAV, description=f"One of {', '.join(SPEECH_FORMATS)}.")
    speed: float | None = Field(None, description="1.0 is the only one available.")
    stream: bool | None = Field(None, description="Send the sound while it is made.")
    stream_format: str | None = Field(None, description="'sse' for events, 'audio' for the bare sound.")
    seed: int | None = Field(None, ge=-LARGEST_INTEGER, le=LARGEST_INTEGER)
    max_new_tokens: int | None = Field(None, ge=1, description="Most frames to speak.")
    talker: dict[str, Any] | None = Field(None, description="Sampling of the talker.")
    chunks: Any = Field(None, description='Sizes of chunks, e.g. {"frames": [4, 25]}; see docs/configuration.md.')
    instructions: str | None = None
    ref_audio: Any = None
    ref_text: Any = None
    sample_rate: int | None = None
    language: str | None = None


class Delivery(Enum):
    """How the sound is sent."""

    WHOLE = "whole"
    BYTES = "bytes"
    EVENTS = "events"


@dataclass(frozen=True, kw_only=True)
class SpeechAsked:
    """One request's wishes. `format` is the name of how the sound is encoded."""

    text: str
    options: OmniOptions
    format: str
    delivery: Delivery

    @property
    def encoding(self) -> Encoding:
        """How the sound is encoded."""
        return SPEECH_FORMATS[self.format]


def read_speech(request: SpeechRequest, plugin: RequestPlugin, plan: Plan) -> SpeechAsked:
    """Read and check what a speech request asks for.

    Raises:
        RequestError: something is unknown or does not fit together; names the field and what is allowed.
    """
    refuse_absurd_values(request)
    _refuse_others(request, plugin.sample_rate)
    sound_format = choice("response_format", request.response_format, SPEECH_FORMATS)
    frames = {} if request.max_new_tokens is None else {"max_tokens": request.max_new_tokens}
    voice, named = _voice(request)
    options = OmniOptions(
        modalities=("audio",),
        voice=voice,
        sampling=read_sampling(plan, {"talker": frames | (request.talker or {})}, seed=request.seed),
        chunks=read_chunks(request.chunks),
    )
    check_options(plugin, options, voice_field=named)
    delivery = _delivery(request, sound_format)
    return SpeechAsked(text=request.input, options=options, format=sound_format, delivery=delivery)


def _refuse_others(request: SpeechRequest, rate: int) -> None:
    for name, why in REFUSED.items():
        if getattr(request, name):
            raise RequestError(f"{name}: is not available: {why}", parameter=name)
    if request.speed not in (None, ONLY_SPEED):
        raise RequestError(
            f"speed: only {ONLY_SPEED} is available, got {request.speed}; change the speed of the sound where it is "
            "played",
            parameter="speed",
        )
    if request.sample_rate not in (None, rate):
        raise RequestError(f"sample_rate: only {rate} is available", parameter="sample_rate")
    if request.language is not None and request.language.lower() != ANY_LANGUAGE:
        raise RequestError(
            f"language: is read from the text; leave it out or say '{ANY_LANGUAGE}'", parameter="language"
        )


def _voice(request: SpeechRequest) -> tuple[str | None, str]:
    """The voice, and the name of the field that says it."""
    return voice_of({name: getattr(request, name) for name in VOICE_FIELDS})


def _delivery(request: SpeechRequest, sound_format: str) -> Delivery:
    """Events if they are asked for; the bare sound as it is made, or in one piece if the format needs its end."""
    kind = request.stream_format
    if kind is not None:
        choice("stream_format", kind, (SSE, AUDIO))
    if SPEECH_FORMATS[sound_format].streams:
        if kind == SSE:
            return Delivery.EVENTS
        return Delivery.BYTES if request.stream or (kind == AUDIO and request.stream is None) else Delivery.WHOLE
    if kind == SSE or request.stream:
        allowed = ", ".join(streaming(SPEECH_FORMATS))
        raise RequestError(
            f"response_format: '{sound_format}' cannot be streamed; use {allowed}", parameter="response_format"
        )
    return Delivery.WHOLE
