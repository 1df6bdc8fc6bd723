"""The output modality audio: writes sound to chat answers in OpenAI's format, and records metrics of sound."""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_omni_ext.errors import RequestError
from vllm_omni_ext.metrics import GAP_S, counter, histogram
from vllm_omni_ext.modalities.base import AUDIO, Assembled, Modality, ModalityStream, OutputChunk
from vllm_omni_ext.modalities.chunks import AudioChunk
from vllm_omni_ext.modalities.fields import choice, flag
from vllm_omni_ext.modalities.sound import CHANNELS, CHAT_FORMATS, WAV, Base64Pieces, SoundStream, encode_aside

KEYS = ("voice", "format")
"""Keys of OpenAI's object `audio` in a request. The voice is passed to the model as one of its fields."""

AUDIO_IN_CONTENT = "audio_in_content"
"""Boolean request field: streamed sound is also sent in `delta.content`, where clients of vllm-omni read it."""

TIME_TO_FIRST_AUDIO = histogram(
    "time_to_first_audio_seconds",
    "Time from the arrival of a request to the first piece of sound of a streamed answer.",
)
AUDIO_CHUNK_GAP = histogram(
    "audio_chunk_gap_seconds", "Time between two pieces of sound of a streamed answer.", buckets=GAP_S
)
AUDIO_SECONDS = counter("audio_seconds_total", "seconds", "Sound made, counted in seconds of playing time.")
AUDIO_UNDERRUN = counter(
    "audio_underrun_seconds_total",
    "seconds",
    "Time in which a real-time player of a streamed answer has no sound left before the end.",
)
REAL_TIME_FACTOR = histogram(
    "real_time_factor",
    "Time from arrival to the last piece of sound, divided by the sound's playing time; below 1 keeps up.",
    buckets=(0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.2, 1.5, 2, 3, 5, 10, 25),
    unit="ratio",
)
METRICS = (TIME_TO_FIRST_AUDIO, AUDIO_CHUNK_GAP, AUDIO_SECONDS, AUDIO_UNDERRUN, REAL_TIME_FACTOR)


@dataclass(frozen=True, kw_only=True)
class AudioEncoding:
    """Encoding of an answer's sound: a key of `CHAT_FORMATS`, and whether `delta.content` has the sound too."""

    format: str
    in_content: bool = False


class AudioStream(ModalityStream):
    """Writes the sound of one streamed chat answer as `delta.audio`."""

    def __init__(self, encoding: AudioEncoding) -> None:
        self._encoding = encoding
        self._audio_id: str | None = new_audio_id()
        self._pieces = Base64Pieces()
        self._encoder = SoundStream(CHAT_FORMATS[encoding.format])
        self._rate = self._samples = self._frames = 0
        self._note: str | None = None

    async def chunk(self, chunk: OutputChunk) -> list[dict[str, Any]]:
        """Return a list with one choice, which has the encoded sound; empty if the encoder has no bytes to send yet."""
        assert isinstance(chunk, AudioChunk)
        samples = len(chunk.samples)
        self._rate, self._frames, self._note = chunk.sample_rate, frames_of(chunk), chunk.note
        self._samples += samples
        data = b""
        if self._samples:  # an answer without samples has no sound, not even a header
            data = await self._encoder.write_aside(chunk.samples, self._rate, last=chunk.last)
        text = self._pieces.write(data, last=chunk.last)
        delta: dict[str, Any] = {"audio": self._audio(data=text)} if text else {}
        if self._encoding.in_content and samples:
            # `content` of each chunk is a complete file, with its own header if the format has a header.
            whole = await encode_aside(chunk.samples, self._rate, CHAT_FORMATS[self._encoding.format])
            delta = {"role": "assistant", "content": base64.b64encode(whole).decode("ascii"), **delta}
        return [self._choice(delta, samples)] if delta else []

    def text(self, delta: dict[str, Any]) -> None:
        """Add the text to the delta as the transcript of the sound."""
        if content := delta.get("content"):
            delta["audio"] = self._audio(transcript=content)

    def end(self) -> list[dict[str, Any]]:
        """Return a list with the choice that ends the sound; its `delta` has `audio.expires_at`."""
        return [self._choice({"audio": {"expires_at": expiry()}}, self._samples)]

    def usage(self) -> Mapping[str, int]:
        """Return {"audio_tokens": number of codec frames so far}."""
        return {"audio_tokens": self._frames}

    def _audio(self, **fields: str) -> dict[str, str]:
        """Return `fields` as the object `delta.audio`, in the first call with the sound's id.

        Clients concatenate the strings of all deltas, so only one delta may have the id.
        """
        named = {} if self._audio_id is None else {"id": self._audio_id}
        self._audio_id = None
        return named | fields

    def _choice(self, delta: dict[str, Any], samples: int) -> dict[str, Any]:
        facts = metadata(self._encoding.format, self._rate, samples, self._note)
        return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, "audio_metadata": facts}


class Audio(Modality):
    """The output modality audio."""

    name = AUDIO
    chunk = AudioChunk
    body_fields = (AUDIO, AUDIO_IN_CONTENT)

    def read(self, body: Mapping[str, Any], *, stream: bool) -> tuple[AudioEncoding, Mapping[str, Any]]:
        """Return (encoding that the body requests, {"audio.voice": name} or {} if the body names no voice)."""
        audio = body.get(AUDIO)
        audio = {} if audio is None else audio
        if not isinstance(audio, dict):
            raise RequestError(f"audio: must be an object with {' and '.join(KEYS)}", parameter=AUDIO)
        for key in audio:
            if key not in KEYS:
                raise RequestError(f"audio.{key}: is unknown; use {', '.join(KEYS)}", parameter=f"audio.{key}")
        given = audio.get("format")
        name = choice("audio.format", WAV if given is None else given, CHAT_FORMATS)
        in_content = flag(AUDIO_IN_CONTENT, body.get(AUDIO_IN_CONTENT))
        fields = {"audio.voice": checked_voice("audio.voice", audio["voice"])} if "voice" in audio else {}
        return AudioEncoding(format=name, in_content=in_content), fields

    async def assemble(self, chunks: Sequence[OutputChunk], encoding: AudioEncoding, text: str) -> Assembled:
        """Return the sound as one file in base64, with its transcript; without samples, the text stays in `content`."""
        if not chunks:
            return Assembled(keep_text=True)
        from openai.types.chat.chat_completion_audio import ChatCompletionAudio

        last, samples = _joined(chunks)
        facts = metadata(encoding.format, last.sample_rate, len(samples), last.note)
        message: dict[str, Any] = {}
        if len(samples):
            data = await encode_aside(samples, last.sample_rate, CHAT_FORMATS[encoding.format])
            encoded = base64.b64encode(data).decode("ascii")
            message["audio"] = ChatCompletionAudio(
                id=new_audio_id(), data=encoded, expires_at=expiry(), transcript=text
            )
        usage = {"audio_tokens": frames_of(last)}
        return Assembled(message=message, choice={"audio_metadata": facts}, usage=usage, keep_text=not len(samples))

    def stream(self, encoding: AudioEncoding) -> AudioStream:
        """Return the writer for one streamed answer."""
        return AudioStream(encoding)

    def offline(self, chunks: Sequence[OutputChunk]) -> Mapping[str, Any]:
        """Return `audio` (samples, or None if empty), `sample_rate`, `frames` and `note`; empty without chunks."""
        if not chunks:
            return {}
        last, samples = _joined(chunks)
        whole = samples if len(samples) else None
        return {"audio": whole, "sample_rate": last.sample_rate, "frames": last.frames, "note": last.note}

    def observe(self, metrics: Any, trace: Any, chunk: OutputChunk, at: float) -> None:
        """Record the sound made, and the delays that a listener of a streamed answer notices."""
        assert isinstance(chunk, AudioChunk)
        facts, samples = trace.facts, len(chunk.samples)
        if not facts:
            facts |= {"samples": 0, "seconds": 0.0} | ({"underrun_s": 0.0} if trace.streamed else {})
        facts["frames"] = frames_of(chunk)
        if samples:
            seconds, times = samples / chunk.sample_rate, trace.times
            if trace.streamed and times:
                metrics.of(AUDIO_CHUNK_GAP).observe(at - times[-1])
                gap = max(0.0, at - (times[0] + facts["seconds"] + facts["underrun_s"]))
                facts["underrun_s"] += gap
                metrics.of(AUDIO_UNDERRUN).inc(gap)
            elif trace.streamed:
                metrics.of(TIME_TO_FIRST_AUDIO).observe(at)
            metrics.of(AUDIO_SECONDS).inc(seconds)
            times.append(at)
            facts["samples"] += samples
            facts["seconds"] = facts["samples"] / chunk.sample_rate
        if chunk.last and facts["samples"]:
            metrics.of(REAL_TIME_FACTOR).observe(trace.times[-1] / facts["seconds"])


def new_audio_id() -> str:
    """Return a new id for the sound of one answer."""
    return f"audio-{uuid.uuid4().hex}"


def expiry() -> int:
    """Return the expiry time of a sound's id in Unix seconds: now, because the server does not store answers."""
    return int(time.time())


def metadata(sound_format: str, rate: int, samples: int, note: str | None = None) -> dict[str, Any]:
    """Return the object `audio_metadata`, which describes the sound of the same choice."""
    facts = {"format": sound_format, "sample_rate_hz": rate, "frame_count": samples, "channels": CHANNELS}
    return facts if note is None else {**facts, "note": note}


def frames_of(chunk: AudioChunk) -> int:
    """Return the number of codec frames from the start of the sound to the end of a chunk."""
    return 0 if chunk.frames is None else len(chunk.frames)


def checked_voice(name: str, voice: Any) -> Any:
    """Return `voice`, the name of a voice or None.

    Args:
        name: path of the field in the body, for the error.

    Raises:
        RequestError: `voice` is of another type, e.g. the object with which OpenAI's API names a custom voice.
    """
    if voice is not None and not isinstance(voice, str):
        raise RequestError(f"{name}: must be the name of a voice; custom voices do not exist", parameter=name)
    return voice


def _joined(chunks: Sequence[OutputChunk]) -> tuple[AudioChunk, np.ndarray[Any, Any]]:
    """Return (last chunk, samples of all chunks joined)."""
    pieces = [chunk for chunk in chunks if isinstance(chunk, AudioChunk)]
    return pieces[-1], np.concatenate([piece.samples for piece in pieces])
