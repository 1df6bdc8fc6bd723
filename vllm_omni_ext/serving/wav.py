"""Sound as bytes: float samples to 16 bit PCM, with or without a WAV header around them."""

from __future__ import annotations

import base64
import io
import struct
from typing import Any

import numpy as np

CHANNELS = 1
SAMPLE_BYTES = 2
UNKNOWN_SIZE = 0xFFFFFFFF
"""Length in the header of a WAV file whose end is not known yet; players then read to the end."""

BASE64_GROUP = 6
"""Bytes: whole samples (2) whose base64 needs no padding (3)."""

Samples = np.ndarray[Any, Any]


def pcm16(samples: Samples) -> bytes:
    """float32 [samples] in [-1, 1] to little-endian 16 bit samples, as libsndfile makes them; louder ones are clipped.

    Needs no libsndfile: bare samples are streamed also where only vLLM is installed.
    """
    scaled = np.clip(np.asarray(samples, np.float32), -1, 1)
    np.rint(np.multiply(scaled, np.float32(2**31), out=scaled), out=scaled)  # libsndfile rounds to 32 bits, and cuts
    np.floor(np.divide(scaled, np.float32(2**16), out=scaled), out=scaled)
    return np.minimum(scaled, 2**15 - 1, out=scaled).astype("<i2").tobytes()


def wav(samples: Samples, rate: int) -> bytes:
    """A complete WAV file, mono, 16 bit."""
    import soundfile

    file = io.BytesIO()
    soundfile.write(file, samples, rate, format="WAV", subtype="PCM_16", endian="LITTLE")
    return file.getvalue()


def wav_stream_header(rate: int) -> bytes:
    """The header of a WAV file of unknown length; `pcm16` samples follow it."""
    block = CHANNELS * SAMPLE_BYTES
    layout = struct.pack("<IHHIIHH", 16, 1, CHANNELS, rate, rate * block, block, 8 * SAMPLE_BYTES)
    size = struct.pack("<I", UNKNOWN_SIZE)
    return b"RIFF" + size + b"WAVE" + b"fmt " + layout + b"data" + size


class Base64Pieces:
    """Base64 of a growing piece of sound.

    The pieces put together are the base64 of the whole, and each one alone is whole samples; what does not fit waits
    for the next piece.
    """

    def __init__(self) -> None:
        self._rest = b""

    def write(self, data: bytes, *, last: bool = False) -> str:
        """Take bytes, give the base64 text that is due ("" if none is)."""
        data = self._rest + data
        due = len(data) if last else len(data) // BASE64_GROUP * BASE64_GROUP
        self._rest = data[due:]
        return base64.b64encode(data[:due]).decode("ascii")
