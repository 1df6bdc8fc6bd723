"""`/v1/audio/speech`, which reads a text out word for word, and `/v1/audio/voices`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from enum import Enum
from http import HTTPStatus
from typing import Any

import numpy as np
from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import Field
from vllm.entrypoints.generate.base.serving import GenerateBaseServing
from vllm.entrypoints.serve.engine.protocol import OpenAIBaseModel
from vllm.entrypoints.serve.utils.api_utils import load_aware_call, validate_json_request, with_cancellation

from vllm_omni_ext.errors import OmniError, RequestError
from vllm_omni_ext.modalities.audio import checked_voice, frames_of
from vllm_omni_ext.modalities.base import AUDIO
from vllm_omni_ext.modalities.chunks import AudioChunk
from vllm_omni_ext.modalities.fields import choice
from vllm_omni_ext.modalities.sound import (
    SPEECH_FORMATS,
    WAV,
    Base64Pieces,
    Encoding,
    SoundStream,
    encode_aside,
)
from vllm_omni_ext.orchestrator.answers import with_first
from vllm_omni_ext.plugins.runtime import Rendered, RequestOptions
from vllm_omni_ext.serving.limits.texts import refuse_long
from vllm_omni_ext.serving.limits.validation import validate_json_values
from vllm_omni_ext.serving.options import LARGEST_INTEGER
from vllm_omni_ext.serving.responses import (
    DONE,
    ERROR_RESPONSES,
    EVENT_STREAM,
    as_vllm_error,
    named_event,
    refusal,
    refusals_counted,
)
from vllm_omni_ext.serving.served import ServedModel

INPUT = "input"
SSE, BYTES = "sse", "audio"
VOICES = ("voice", "speaker")
MAX_NEW_TOKENS = "max_new_tokens"
VOICES_OF_CARD = ("voices", "default_voice")

Chunks = AsyncGenerator[AudioChunk, None]

router = APIRouter()

_SOUND = {
    encoding.media_type: {"schema": {"type": "string", "format": "binary"}} for encoding in SPEECH_FORMATS.values()
}


class SpeechRequest(OpenAIBaseModel):
    """Body of `/v1/audio/speech`: OpenAI's fields and those of vllm-omni; parameters of stages are accepted too."""

    input: str = Field(description="The text, spoken word for word.")
    model: str | None = None
    voice: Any = Field(None, description="A speaker of the checkpoint; see /v1/audio/voices.")
    speaker: Any = Field(None, description="Another name of `voice`.")
    response_format: str = Field(WAV, description=f"One of {', '.join(SPEECH_FORMATS)}.")
    speed: float | None = Field(None, description="1.0 is as the model speaks.")
    stream: bool | None = Field(None, description="Send the sound while it is made.")
    stream_format: str | None = Field(None, description="'sse' for events, 'audio' for the bare sound.")
    seed: int | None = Field(None, ge=-LARGEST_INTEGER, le=LARGEST_INTEGER)
    max_new_tokens: int | None = Field(None, ge=1, description="Most frames to speak.")
    chunks: Any = Field(None, description='Sizes of chunks, e.g. {"frames": [4, 25]}; see docs/configuration.md.')
    instructions: str | None = None
    ref_audio: Any = None
    ref_text: Any = None
    sample_rate: int | None = None
    language: str | None = None


@router.post(
    "/v1/audio/speech",
    dependencies=[Depends(validate_json_request)],
    response_class=Response,
    responses={
        HTTPStatus.OK.value: {"content": {**_SOUND, EVENT_STREAM: {}}},
        **ERROR_RESPONSES,
    },
)
@with_cancellation
@load_aware_call
async def create_speech(request: SpeechRequest, raw_request: Request) -> Response:
    """Read a text out."""
    serving: OmniServingSpeech = raw_request.app.state.omni_serving_speech
    return await serving.create_speech(request, raw_request)


@router.get("/v1/audio/voices")
async def list_voices(raw_request: Request) -> dict[str, Any]:
    """Return the speakers of the checkpoint."""
    card = raw_request.app.state.omni_serving_speech.card
    return {name: card[name] for name in VOICES_OF_CARD if name in card}


class Delivery(Enum):
    """How the sound is sent."""

    WHOLE = "whole"
    BYTES = "bytes"
    EVENTS = "events"


@dataclass(frozen=True, kw_only=True)
class SpeechJob:
    """A checked request. `format` is the name of the sound's encoding."""

    rendered: Rendered
    options: RequestOptions
    format: str
    delivery: Delivery

    @property
    def encoding(self) -> Encoding:
        """The encoding of the sound."""
        return SPEECH_FORMATS[self.format]


class OmniServingSpeech(GenerateBaseServing):
    """Speech without a conversation."""

    def __init__(self, model: ServedModel, **stock: Any) -> None:
        super().__init__(engine_client=model.omni, **stock)
        self._model = model
        self.card: Mapping[str, Any] = model.capabilities.card

    async def create_speech(self, request: SpeechRequest, raw_request: Request) -> Response:
        """Answer a speech request."""
        unknown = await self._check_model(request)  # type: ignore[arg-type]  # it reads the model's name
        if unknown is not None:
            return refusal(unknown)
        request_id = f"speech-{self._base_request_id(raw_request)}"
        try:
            with refusals_counted(self._model.omni):
                job = await read_speech(request, self._model)
                self._preflight()
                chunks = _sound_of(self._model.server.generate(job.rendered, job.options, request_id))
            if job.delivery is Delivery.WHOLE:
                return await _whole(job, chunks)
            first = await anext(chunks)  # an error before the first sound still gets its own HTTP status
        except OmniError as err:
            return refusal(self.create_error_response(as_vllm_error(err)))
        sound = _Sound(job, with_first(first, chunks))
        if job.delivery is Delivery.BYTES:
            return StreamingResponse(sound.bytes(), media_type=job.encoding.media_type)
        return StreamingResponse(sound.events(self), media_type=EVENT_STREAM)


def install(app: FastAPI, model: ServedModel, **stock: Any) -> None:
    """Add the routes."""
    app.state.omni_serving_speech = OmniServingSpeech(model, **stock)
    app.include_router(router)


async def read_speech(request: SpeechRequest, model: ServedModel) -> SpeechJob:
    """Read and check a speech request.

    Raises:
        RequestError: a field is unknown or contradicts another one; names the field and the allowed values.
    """
    await refuse_long(model.omni, INPUT, request.input)
    validate_json_values(request)
    sound_format = choice("response_format", request.response_format, SPEECH_FORMATS)
    for name in VOICES:
        checked_voice(name, getattr(request, name))
    body = {name: getattr(request, name) for name in request.model_fields_set} | (request.model_extra or {})
    found = model.read(_limited(body, model.surface.speech_stage), stream=False, seed=request.seed, modalities=(AUDIO,))
    model.check(found, found.options)
    delivery = _delivery(request)
    rendered = await model.surface.speech(request, found.options, model.server)
    return SpeechJob(rendered=rendered, options=found.options, format=sound_format, delivery=delivery)


def _limited(body: dict[str, Any], stage: str) -> dict[str, Any]:
    """Return the body with its limit of new tokens as a parameter of the stage that speaks."""
    if (most := body.pop(MAX_NEW_TOKENS, None)) is None:
        return body
    if not stage:
        raise RequestError(f"{MAX_NEW_TOKENS}: is not available with this model", parameter=MAX_NEW_TOKENS)
    params = body.get(stage)
    if params is None or isinstance(params, dict):
        body[stage] = {"max_tokens": most} | (params or {})
    return body


def _delivery(request: SpeechRequest) -> Delivery:
    """Return the delivery: events or a stream on request, else one piece."""
    kind = request.stream_format
    if kind is not None:
        choice("stream_format", kind, (SSE, BYTES))
    if kind == SSE:
        return Delivery.EVENTS
    return Delivery.BYTES if request.stream or (kind == BYTES and request.stream is None) else Delivery.WHOLE


async def _whole(job: SpeechJob, source: Chunks) -> Response:
    async with aclosing(source):
        chunks = [chunk async for chunk in source]
    samples, last = np.concatenate([chunk.samples for chunk in chunks]), chunks[-1]
    data = await encode_aside(samples, last.sample_rate, job.encoding)
    return Response(data, media_type=job.encoding.media_type, headers=_headers(job.rendered.tokens, frames_of(last)))


class _Sound:
    """One streamed answer."""

    def __init__(self, job: SpeechJob, chunks: Chunks) -> None:
        self._job = job
        self._chunks = chunks
        self._encoder = SoundStream(job.encoding)

    async def _data(self, chunk: AudioChunk) -> bytes:
        return await self._encoder.write_aside(chunk.samples, chunk.sample_rate, last=chunk.last)

    async def bytes(self) -> AsyncGenerator[bytes, None]:
        """Yield the bare sound. A failure closes the connection, because the status has been sent already."""
        async with aclosing(self._chunks):
            async for chunk in self._chunks:
                if data := await self._data(chunk):
                    yield data

    async def events(self, serving: OmniServingSpeech) -> AsyncGenerator[str, None]:
        """Yield the sound as server-sent events; the concatenated pieces form one file."""
        text, frames = Base64Pieces(), 0
        try:
            async with aclosing(self._chunks):
                async for chunk in self._chunks:
                    frames = frames_of(chunk)
                    if due := text.write(await self._data(chunk), last=chunk.last):
                        yield named_event("speech.audio.delta", audio=due, response_format=self._job.format)
        except OmniError as err:
            error = serving.create_error_response(as_vllm_error(err)).error
            yield named_event("speech.audio.error", error=error.model_dump())
            yield DONE
            return
        yield named_event("speech.audio.done", usage=usage(self._job.rendered.tokens, frames))


async def _sound_of(source: AsyncGenerator[Any, None]) -> Chunks:
    """Yield the chunks with sound."""
    async with aclosing(source):
        async for chunk in source:
            if isinstance(chunk, AudioChunk):
                yield chunk


def usage(tokens: int, frames: int) -> dict[str, Any]:
    """Return the usage of a request: tokens of its text, frames of its sound."""
    return {
        "input_tokens": tokens,
        "output_tokens": frames,
        "total_tokens": tokens + frames,
        "input_token_details": {"text_tokens": tokens, "audio_tokens": 0},
    }


def _headers(tokens: int, frames: int) -> dict[str, str]:
    counts = {"INPUT": tokens, "OUTPUT": frames, "TOTAL": tokens + frames, "INPUT-TEXT": tokens, "INPUT-AUDIO": 0}
    return {f"X-VLLM-OMNI-{name}-TOKENS": str(count) for name, count in counts.items()}
