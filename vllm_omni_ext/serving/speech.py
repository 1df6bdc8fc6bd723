"""Routes `/v1/audio/speech`, which synthesizes a text word for word, and `/v1/audio/voices`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any

import numpy as np
from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import Response
from pydantic import Field
from vllm.entrypoints.serve.engine.protocol import OpenAIBaseModel
from vllm.entrypoints.serve.utils.api_utils import load_aware_call, validate_json_request, with_cancellation

from vllm_omni_ext.errors import RequestError
from vllm_omni_ext.modalities.audio import checked_voice, frames_of
from vllm_omni_ext.modalities.base import AUDIO
from vllm_omni_ext.modalities.chunks import AudioChunk
from vllm_omni_ext.modalities.fields import choice
from vllm_omni_ext.modalities.sound import SPEECH_FORMATS, WAV, Base64Pieces, Encoding, SoundStream, encode_aside
from vllm_omni_ext.plugins.runtime import Rendered, RequestOptions
from vllm_omni_ext.serving.direct import DirectAnswer, DirectServing, only
from vllm_omni_ext.serving.limits.texts import refuse_long
from vllm_omni_ext.serving.limits.validation import validate_json_values
from vllm_omni_ext.serving.options import LARGEST_INTEGER, check
from vllm_omni_ext.serving.responses import ERROR_RESPONSES, EVENT_STREAM, named_event
from vllm_omni_ext.serving.served import ServedModel

INPUT = "input"
ROUTE = "speech"
"""Key in `Capabilities.routes` of the stages that speech requests need."""

SSE, BYTES = "sse", "audio"
VOICES = ("voice", "speaker")
MAX_NEW_TOKENS = "max_new_tokens"
VOICES_OF_CARD = ("voices", "default_voice")

OF_FAMILIES: dict[str, Any] = {
    **dict.fromkeys(VOICES),
    "speed": 1.0,
    **dict.fromkeys(("instructions", "ref_audio", "ref_text", "sample_rate", "language")),
}
"""Fields that not every model family supports, with the value that has no effect and is always allowed."""

router = APIRouter()

_SOUND = {
    encoding.media_type: {"schema": {"type": "string", "format": "binary"}} for encoding in SPEECH_FORMATS.values()
}


class SpeechRequest(OpenAIBaseModel):
    """Body of `/v1/audio/speech`: the fields of OpenAI and of the project vllm-omni.

    Fields named after stages, with parameters of these stages, are allowed too.
    """

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
    """Synthesize a text."""
    serving: DirectServing = raw_request.app.state.omni_serving_speech
    if (unknown := await serving.check_model(request)) is not None:
        return unknown
    serving.refuse_adapter(request.model, ROUTE)
    return await serving.respond(await read_speech(request, serving.model), raw_request, "speech")


@router.get("/v1/audio/voices")
async def list_voices(raw_request: Request) -> dict[str, Any]:
    """Return the names of the checkpoint's speakers, and the default speaker."""
    card = raw_request.app.state.omni_serving_speech.model.capabilities.card
    return {name: card[name] for name in VOICES_OF_CARD if name in card}


@dataclass(kw_only=True)
class SpeechAnswer(DirectAnswer):
    """Starts a checked speech request, and writes its answer: the encoded sound, or events that contain the sound.

    Attributes:
        rendered: the prompt.
        options: options of the request.
        format: encoding of the sound, a key of `SPEECH_FORMATS`.
    """

    error_event = "speech.audio.error"
    rendered: Rendered
    options: RequestOptions
    format: str
    media_type: str | None

    def start(self, model: ServedModel, request_id: str) -> AsyncGenerator[AudioChunk, None]:
        return only(AudioChunk, model.generate(self.rendered, self.options, request_id))

    async def whole(self, chunks: AsyncGenerator[AudioChunk, None]) -> Response:
        async with aclosing(chunks):
            sound = [chunk async for chunk in chunks]
        samples, last, encoding = np.concatenate([chunk.samples for chunk in sound]), sound[-1], self._encoding
        data = await encode_aside(samples, last.sample_rate, encoding)
        return Response(data, media_type=encoding.media_type, headers=_headers(self.rendered.tokens, frames_of(last)))

    async def stream(self, chunks: AsyncGenerator[AudioChunk, None]) -> AsyncGenerator[str | bytes, None]:
        """Yield the encoded sound, or events that contain the encoded sound in base64."""
        encoder, base64, frames = SoundStream(self._encoding), Base64Pieces(), 0
        async with aclosing(chunks):
            async for chunk in chunks:
                frames = frames_of(chunk)
                data = await encoder.write_aside(chunk.samples, chunk.sample_rate, last=chunk.last)
                if self.media_type != EVENT_STREAM:
                    if data:
                        yield data
                elif due := base64.write(data, last=chunk.last):
                    yield named_event("speech.audio.delta", audio=due, response_format=self.format)
        if self.media_type == EVENT_STREAM:
            yield named_event("speech.audio.done", usage=usage(self.rendered.tokens, frames))

    @property
    def _encoding(self) -> Encoding:
        return SPEECH_FORMATS[self.format]


def install(app: FastAPI, model: ServedModel, **stock: Any) -> None:
    """Add the routes of the speech API to the application; `stock` are arguments of `GenerateBaseServing`."""
    app.state.omni_serving_speech = DirectServing(model, **stock)
    app.include_router(router)


async def read_speech(request: SpeechRequest, model: ServedModel) -> SpeechAnswer:
    """Check a speech request, and return the `SpeechAnswer` that starts it.

    Raises:
        RequestError: a field is invalid; names the field and the allowed values.
    """
    await refuse_long(model.omni, INPUT, request.input)
    validate_json_values(request)
    sound_format = choice("response_format", request.response_format, SPEECH_FORMATS)
    for name in VOICES:
        checked_voice(name, getattr(request, name))
    body = {name: getattr(request, name) for name in request.model_fields_set} | (request.model_extra or {})
    _refuse_others(body, model)
    found = model.read(_limited(body, model.surface.speech_stage), stream=False, seed=request.seed, modalities=(AUDIO,))
    check(model.runtime, found.options, found.paths)
    media_type = _media_type(request)
    options = replace(found.options, streamed=media_type is not None)
    rendered = await model.surface.speech(request, options, model)
    return SpeechAnswer(rendered=rendered, options=options, format=sound_format, media_type=media_type)


def _refuse_others(body: dict[str, Any], model: ServedModel) -> None:
    """Raise RequestError if the body has a field that neither this API nor the model family uses."""
    known = {*model.fields.names, *model.surface.speech_fields}
    for name, neutral in OF_FAMILIES.items():
        if name not in known and body.get(name) not in (None, neutral):
            raise RequestError(f"{name}: is not available with this model", parameter=name)
    audio = body.get(AUDIO)
    if isinstance(audio, dict) and audio.get("format") is not None:
        raise RequestError("audio.format: is not used here; write response_format", parameter="audio.format")
    used = {*known, *SpeechRequest.model_fields, AUDIO}
    model.refuse_unknown(body, used, "/v1/audio/speech")


def _limited(body: dict[str, Any], stage: str) -> dict[str, Any]:
    """Move `max_new_tokens` of the body to `max_tokens` of a stage, in place; return the body.

    Args:
        stage: `HttpSurface.speech_stage`, the stage whose tokens are limited; "": the model has no such limit.

    Raises:
        RequestError: the body has `max_new_tokens`, and `stage` is "", or the stage's `max_tokens` has another value.
    """
    if (most := body.pop(MAX_NEW_TOKENS, None)) is None:
        return body
    if not stage:
        raise RequestError(f"{MAX_NEW_TOKENS}: is not available with this model", parameter=MAX_NEW_TOKENS)
    params = body.get(stage)
    if params is None or isinstance(params, dict):
        if (other := (params or {}).get("max_tokens")) not in (None, most):
            name = f"{stage}.max_tokens"
            message = f"{name}: has another value than '{MAX_NEW_TOKENS}', {other!r:.100}; set one of them"
            raise RequestError(message, parameter=name)
        body[stage] = {"max_tokens": most} | (params or {})
    return body


def _media_type(request: SpeechRequest) -> str | None:
    """Return the MIME type of a streamed answer (events or sound); None: the answer is not streamed."""
    kind = request.stream_format
    if kind is not None:
        choice("stream_format", kind, (SSE, BYTES))
    if kind == SSE:
        return EVENT_STREAM
    streamed = request.stream or (kind == BYTES and request.stream is None)
    return SPEECH_FORMATS[request.response_format].media_type if streamed else None


def usage(tokens: int, frames: int) -> dict[str, Any]:
    """Return the `usage` object of a request: input tokens are tokens of text, output tokens are frames of sound."""
    return {
        "input_tokens": tokens,
        "output_tokens": frames,
        "total_tokens": tokens + frames,
        "input_token_details": {"text_tokens": tokens, "audio_tokens": 0},
    }


def _headers(tokens: int, frames: int) -> dict[str, str]:
    counts = {"INPUT": tokens, "OUTPUT": frames, "TOTAL": tokens + frames, "INPUT-TEXT": tokens, "INPUT-AUDIO": 0}
    return {f"X-VLLM-OMNI-{name}-TOKENS": str(count) for name, count in counts.items()}
