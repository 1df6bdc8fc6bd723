"""Encodes float samples as 16-bit PCM, with or without a WAV header, or as other files: libsndfile encodes whole
files, FFmpeg encodes streamed files.
"""

from __future__ import annotations

import asyncio
import base64
import io
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

CHANNELS = 1
SAMPLE_BYTES = 2
UNKNOWN_SIZE = 0xFFFFFFFF
"""Length in the header of a streamed WAV file; with this value, players read to the end of the file."""

BASE64_GROUP = 6
"""Bytes of three 16-bit samples, the smallest number of whole samples whose base64 needs no padding."""

BIT_RATE = 64_000
"""Bits per second of streamed mp3, opus and aac."""

Samples = np.ndarray[Any, Any]

WAV, PCM, PCM16 = "wav", "pcm", "pcm16"


@dataclass(frozen=True)
class Encoding:
    """A file type and codec of sound.

    Attributes:
        media_type: MIME type.
        container: libsndfile's name of the file type, for whole files; "": FFmpeg, or no encoder, writes whole files.
        muxer: FFmpeg's name of the file type, for streamed sound; "": 16-bit samples, which need no encoder.
        codec: FFmpeg's name of the encoder.
        subtype: libsndfile's name of the sample format; None: the default of the file type.
        options: options of the muxer, so that it writes each packet at once and never changes written bytes.
    """

    media_type: str
    container: str = ""
    muxer: str = ""
    codec: str = ""
    subtype: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)


MP3_OPTIONS = {"write_xing": "0", "id3v2_version": "0"}
OGG_OPTIONS = {"page_duration": "20000"}
"""`page_duration` is in microseconds; its default of 1 s delays the first sound."""

_WAV, _BARE = Encoding("audio/wav", "WAV"), Encoding("audio/pcm")
_FILES = {
    "flac": Encoding("audio/flac", "FLAC", "flac", "flac"),
    "mp3": Encoding("audio/mpeg", "MP3", "mp3", "libmp3lame", options=MP3_OPTIONS),
    "opus": Encoding("audio/ogg", "OGG", "ogg", "libopus", subtype="OPUS", options=OGG_OPTIONS),
    "aac": Encoding("audio/aac", "", "adts", "aac"),
}

CHAT_FORMATS: Mapping[str, Encoding] = {WAV: _WAV, PCM16: _BARE, **_FILES}
"""Encodings by the value of `audio.format` in a chat request."""

SPEECH_FORMATS: Mapping[str, Encoding] = {WAV: _WAV, PCM: _BARE, **_FILES}
"""Encodings by the value of `response_format` in a speech request."""


class SoundStream:
    """Encodes one sound piece by piece; the concatenated results are one file."""

    def __init__(self, encoding: Encoding) -> None:
        self._encoding = encoding
        self._header_due = encoding is _WAV
        self._file: _StreamedFile | None = None

    def write(self, samples: Samples, rate: int, *, last: bool) -> bytes:
        """Encode float32 [samples] in [-1, 1] at `rate` Hz; return the bytes that the encoder has finished so far.

        Args:
            last: no sound follows; the encoder finishes the file.
        """
        data = pcm16(samples)
        if not self._encoding.muxer:
            if self._header_due:
                data, self._header_due = wav_stream_header(rate) + data, False
            return data
        if self._file is None:
            self._file = _StreamedFile(self._encoding, rate)
        return self._file.write(np.frombuffer(data, "<i2"), last=last)

    async def write_aside(self, samples: Samples, rate: int, *, last: bool) -> bytes:
        """Do the same as `write` in a thread if FFmpeg encodes, so that the event loop is not blocked."""
        if not self._encoding.muxer:
            return self.write(samples, rate, last=last)
        return await asyncio.to_thread(self.write, samples, rate, last=last)


class _StreamedFile:
    """A file that FFmpeg encodes piece by piece."""

    def __init__(self, encoding: Encoding, rate: int) -> None:
        import av

        self._frame, self._rate, self._written, self._due = av.AudioFrame, rate, 0, bytearray()
        options = {**encoding.options, "flush_packets": "1"}
        self._container = av.open(_Appended(self._due), "w", format=encoding.muxer, options=options)
        rates = av.codec.Codec(encoding.codec, "w").audio_rates
        allowed = rate if not rates or rate in rates else max(rates)
        stream: Any = self._container.add_stream(encoding.codec, rate=allowed, layout="mono")
        stream.bit_rate = BIT_RATE
        self._stream = stream

    def write(self, samples: Samples, *, last: bool) -> bytes:
        """Encode int16 [samples]; return the bytes that FFmpeg has written since the last call."""
        if len(samples):
            frame = self._frame.from_ndarray(samples[None], format="s16", layout="mono")
            frame.sample_rate, frame.pts = self._rate, self._written
            self._written += len(samples)
            self._container.mux(self._stream.encode(frame))
        if last:
            if self._written:
                self._container.mux(self._stream.encode(None))
            self._container.close()
        data = bytes(self._due)
        self._due.clear()
        return data


class _Appended:
    """Output file for FFmpeg that appends to a buffer. It has no `seek`, so FFmpeg never changes written bytes."""

    def __init__(self, due: bytearray) -> None:
        self._due = due

    def write(self, data: bytes) -> int:
        """Append `data` to the buffer."""
        self._due += data
        return len(data)


def encode(samples: Samples, rate: int, encoding: Encoding) -> bytes:
    """Return a complete mono file, or PCM bytes without header; all formats encode the same 16-bit samples."""
    if not encoding.container:
        return SoundStream(encoding).write(samples, rate, last=True)
    import soundfile

    file, data = io.BytesIO(), np.frombuffer(pcm16(samples), "<i2")
    soundfile.write(file, data, rate, format=encoding.container, subtype=encoding.subtype)
    return file.getvalue()


async def encode_aside(samples: Samples, rate: int, encoding: Encoding) -> bytes:
    """Run `encode` in a thread, for callers in an event loop."""
    return await asyncio.to_thread(encode, samples, rate, encoding)


def pcm16(samples: Samples) -> bytes:
    """Convert float32 [samples] to little-endian 16-bit samples as libsndfile does; values outside [-1, 1] are clipped.

    Does not need libsndfile, so PCM can be streamed where only vLLM is installed.
    """
    scaled = np.clip(np.asarray(samples, np.float32), -1, 1)
    # libsndfile rounds to 32 bits, then truncates.
    np.rint(np.multiply(scaled, np.float32(2**31), out=scaled), out=scaled)
    np.floor(np.divide(scaled, np.float32(2**16), out=scaled), out=scaled)
    return np.minimum(scaled, 2**15 - 1, out=scaled).astype("<i2").tobytes()


def wav_stream_header(rate: int) -> bytes:
    """Return the header of a WAV file (mono, 16 bits) of unknown length; the bytes of `pcm16` follow it."""
    block = CHANNELS * SAMPLE_BYTES
    layout = struct.pack("<IHHIIHH", 16, 1, CHANNELS, rate, rate * block, block, 8 * SAMPLE_BYTES)
    size = struct.pack("<I", UNKNOWN_SIZE)
    return b"RIFF" + size + b"WAVE" + b"fmt " + layout + b"data" + size


class Base64Pieces:
    """Incremental base64 encoder for sound.

    The concatenated pieces are the base64 of the whole sound, and each piece contains whole samples. Bytes that do not
    fill a group of `BASE64_GROUP` bytes are added to the next piece.
    """

    def __init__(self) -> None:
        self._rest = b""

    def write(self, data: bytes, *, last: bool = False) -> str:
        """Add bytes, and return the base64 text of the complete groups ("" if there are none)."""
        data = self._rest + data
        due = len(data) if last else len(data) // BASE64_GROUP * BASE64_GROUP
        self._rest = data[due:]
        return base64.b64encode(data[:due]).decode("ascii")
