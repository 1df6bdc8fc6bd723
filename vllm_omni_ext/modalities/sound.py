"""Encodes sound: float samples to 16-bit PCM, bare, with a WAV header, or as a file that libsndfile writes."""

from __future__ import annotations

import asyncio
import base64
import io
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

CHANNELS = 1
SAMPLE_BYTES = 2
UNKNOWN_SIZE = 0xFFFFFFFF
"""Length in the header of a WAV file of unknown size; players then read to the end of the file."""

BASE64_GROUP = 6
"""Bytes: three 2-byte samples, whose base64 needs no padding."""

Samples = np.ndarray[Any, Any]

WAV, PCM, PCM16 = "wav", "pcm", "pcm16"


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """An encoding of sound.

    Attributes:
        container: libsndfile's name of the file type; "" for bare samples.
        subtype: libsndfile's name of the sample format.
        media_type: MIME type.
        streams: the format can be sent while the sound is being made.
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
"""Values of `audio.format` of a chat request."""

SPEECH_FORMATS: Mapping[str, Encoding] = {WAV: _WAV, PCM: _BARE, **_FILES}
"""Values of `response_format` of a speech request."""


def streaming(formats: Mapping[str, Encoding]) -> tuple[str, ...]:
    """Return the names of the formats that can be streamed."""
    return tuple(name for name, encoding in formats.items() if encoding.streams)


def encode(samples: Samples, rate: int, encoding: Encoding) -> bytes:
    """Return a complete file (or bare samples), mono; every format is encoded from the same 16-bit samples."""
    data = pcm16(samples)
    if not encoding.container:
        return data
    import soundfile

    file = io.BytesIO()
    soundfile.write(file, np.frombuffer(data, "<i2"), rate, format=encoding.container, subtype=encoding.subtype)
    return file.getvalue()


async def encode_aside(samples: Samples, rate: int, encoding: Encoding) -> bytes:
    """Like `encode`, in a thread."""
    return await asyncio.to_thread(encode, samples, rate, encoding)


def pcm16(samples: Samples) -> bytes:
    """Convert float32 [samples] in [-1, 1] to little-endian 16-bit samples as libsndfile does; louder samples are
    clipped.

    Does not need libsndfile, so that bare samples can be streamed where only vLLM is installed.
    """
    scaled = np.clip(np.asarray(samples, np.float32), -1, 1)
    np.rint(
        np.multiply(scaled, np.float32(2**31), out=scaled), out=scaled
    )  # libsndfile rounds to 32 bits, then truncates
    np.floor(np.divide(scaled, np.float32(2**16), out=scaled), out=scaled)
    return np.minimum(scaled, 2**15 - 1, out=scaled).astype("<i2").tobytes()


def wav_stream_header(rate: int) -> bytes:
    """Return the header of a WAV file of unknown length; `pcm16` samples follow it."""
    block = CHANNELS * SAMPLE_BYTES
    layout = struct.pack("<IHHIIHH", 16, 1, CHANNELS, rate, rate * block, block, 8 * SAMPLE_BYTES)
    size = struct.pack("<I", UNKNOWN_SIZE)
    return b"RIFF" + size + b"WAVE" + b"fmt " + layout + b"data" + size


class Base64Pieces:
    """Incremental base64 encoder for sound.

    The concatenated pieces are the base64 of the whole, and each piece contains whole samples; bytes that do not fill a
    group of `BASE64_GROUP` bytes wait for the next piece.
    """

    def __init__(self) -> None:
        self._rest = b""

    def write(self, data: bytes, *, last: bool = False) -> str:
        """Add bytes; return the base64 text that is complete ("" if none is)."""
        data = self._rest + data
        due = len(data) if last else len(data) // BASE64_GROUP * BASE64_GROUP
        self._rest = data[due:]
        return base64.b64encode(data[:due]).decode("ascii")
