"""`/v1/audio/speech`: a text read out word for word by the stages behind the text stage."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import numpy as np
from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from vllm.entrypoints.generate.base.serving import GenerateBaseServing

from vllm_omni_ext.errors import OmniError, RequestError
from vllm_omni_ext.omni import AsyncOmni
from vllm_omni_ext.orchestrator.recital import Recital
from vllm_omni_ext.outputs import AudioOutput
from vllm_omni_ext.serving.encoding import WAV, encode_aside
from vllm_omni_ext.serving.failures import as_vllm_error
from vllm_omni_ext.serving.speech_options import Delivery, SpeechAsked, SpeechRequest, read_speech
from vllm_omni_ext.serving.wav import Base64Pieces, pcm16, wav_stream_header

Pieces = AsyncGenerator[AudioOutput, None]
EVENT_STREAM = "text/event-stream"


class OmniServingSpeech(GenerateBaseServing):
    """Speech without a conversation."""

    engine_client: AsyncOmni

    async def create_speech(self, request: SpeechRequest, raw_request: Request) -> Response:
        """Answer a speech request."""
        omni = self.engine_client
        unknown = await self._check_model(request)  # type: ignore[arg-type]  # it reads the model's name
        if unknown is not None:
            return self._refusal(unknown)
        request_id = f"speech-{self._base_request_id(raw_request)}"
        try:
            refuse_long_text(request.input, omni)
            asked = read_speech(request, omni.plugin, omni.plan)
            self._preflight()
            recital = await omni.speak(asked.text, asked.options, request_id)
            pieces = recital.pieces()
            if asked.delivery is Delivery.WHOLE:
                return await self._whole(asked, recital, pieces)
            first = await anext(pieces)  # what fails until then is an error with a status of its own
        except OmniError as err:
            return self._refusal(self.create_error_response(as_vllm_error(err)))
        sound = _Sound(asked, recital, omni.plugin.sample_rate)
        if asked.delivery is Delivery.BYTES:
            return StreamingResponse(sound.bytes(first, pieces), media_type=asked.encoding.media_type)
        return StreamingResponse(sound.events(first, pieces, self), media_type=EVENT_STREAM)

    async def _whole(self, asked: SpeechAsked, recital: Recital, pieces: Pieces) -> Response:
        async with aclosing(pieces):
            heard = [piece async for piece in pieces]
        rate = self.engine_client.plugin.sample_rate
        data = await encode_aside(np.concatenate([piece.samples for piece in heard]), rate, asked.encoding)
        headers = _headers(recital.tokens, len(heard[-1].frames))
        return Response(data, media_type=asked.encoding.media_type, headers=headers)

    @staticmethod
    def _refusal(error: Any) -> JSONResponse:
        return JSONResponse(error.model_dump(), status_code=error.error.code)


class _Sound:
    """One streamed answer."""

    def __init__(self, asked: SpeechAsked, recital: Recital, rate: int) -> None:
        self._asked = asked
        self._recital = recital
        self._header = wav_stream_header(rate) if asked.format == WAV else b""

    async def bytes(self, first: AudioOutput, rest: Pieces) -> AsyncGenerator[bytes, None]:
        """The bare sound. A failure ends the connection: there is no other way to say it."""
        yield self._header
        async for piece in _all(first, rest):
            yield pcm16(piece.samples)

    async def events(self, first: AudioOutput, rest: Pieces, serving: OmniServingSpeech) -> AsyncGenerator[str, None]:
        """The sound as server-sent events; the pieces put together are one file."""
        text = Base64Pieces()
        frames = 0
        try:
            async for piece in _all(first, rest):
                frames = len(piece.frames)
                data, self._header = self._header + pcm16(piece.samples), b""
                if due := text.write(data, last=piece.finished):
                    yield _event("speech.audio.delta", audio=due, response_format=self._asked.format)
        except OmniError as err:
            error = serving.create_error_response(as_vllm_error(err)).error
            yield _event("speech.audio.error", error=error.model_dump())
            yield "data: [DONE]\n\n"
            return
        yield _event("speech.audio.done", usage=usage(self._recital.tokens, frames))


async def _all(first: AudioOutput, rest: Pieces) -> Pieces:
    async with aclosing(rest):
        yield first
        async for piece in rest:
            yield piece


def refuse_long_text(text: str, omni: AsyncOmni) -> None:
    """Look at nothing but the length of a text, before anything else looks at its characters.

    Raises:
        RequestError: no stage has room for so many characters, however long its tokens are.
    """
    most = omni.model_config.max_model_len * omni.renderer.get_tokenizer().max_chars_per_token
    if len(text) > most:
        raise RequestError(f"input: at most {most} characters fit, got {len(text)}", parameter="input")


def usage(tokens: int, frames: int) -> dict[str, Any]:
    """What a request cost: tokens of its text, frames of its sound."""
    return {
        "input_tokens": tokens,
        "output_tokens": frames,
        "total_tokens": tokens + frames,
        "input_token_details": {"text_tokens": tokens, "audio_tokens": 0},
    }


def _headers(tokens: int, frames: int) -> dict[str, str]:
    counts = {"INPUT": tokens, "OUTPUT": frames, "TOTAL": tokens + frames, "INPUT-TEXT": tokens, "INPUT-AUDIO": 0}
    return {f"X-VLLM-OMNI-{name}-TOKENS": str(count) for name, count in counts.items()}


def _event(kind: str, **fields: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields}, separators=(',', ':'))}\n\n"
