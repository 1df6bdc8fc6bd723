"""How sound is written in an answer. libsndfile encodes; long ones in a thread of their own."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from vllm_omni_ext.serving.wav import Samples, pcm16

WAV, PCM, PCM16 = "wav", "pcm", "pcm16"


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """One way to write sound.

    Attributes:
        container: libsndfile's name of the file type; "" for bare samples.
        subtype: libsndfile's name of what is in it.
        media_type: for HTTP.
        streams: whether it can be sent while it is made.
    """

    container: str
    subtype: str
    media_type: str
    streams: bool = False


_BARE = Encoding(container="", subtype="", media_type="audio/pcm", streams=True)
_FILES = {
    "flac": Encoding(container="FLAC", subtype="PCM_16", media_type="audio/flac"),
    "mp3": Encoding(container="MP3", subtype="MPEG_LAYER_III", media_type="audio/mpeg"),
    "opus": Encoding(container="OGG", subtype="OPUS", media_type="audio/ogg"),
}
_WAV = Encoding(container="WAV", subtype="PCM_16", media_type="audio/wav", streams=True)

CHAT_FORMATS: Mapping[str, Encoding] = {WAV: _WAV, PCM16: _BARE, **_FILES}
"""`audio.format` of a chat request."""

SPEECH_FORMATS: Mapping[str, Encoding] = {WAV: _WAV, PCM: _BARE, **_FILES}
"""`response_format` of a speech request."""


def streaming(formats: Mapping[str, Encoding]) -> tuple[str, ...]:
    """Names of those that can be sent while they are made."""
    return tuple(name for name, encoding in formats.items() if encoding.streams)


def encode(samples: Samples, rate: int, encoding: Encoding) -> bytes:
    """A complete file (or bare samples), mono; every format is made of the same 16 bit samples."""
    data = pcm16(samples)
    if not encoding.container:
        return data
    import soundfile

    file = io.BytesIO()
    soundfile.write(file, np.frombuffer(data, "<i2"), rate, format=encoding.container, subtype=encoding.subtype)
    return file.getvalue()


async def encode_aside(samples: Samples, rate: int, encoding: Encoding) -> bytes:
    """As `encode`, without holding up the event loop."""
    return await asyncio.to_thread(encode, samples, rate, encoding)
