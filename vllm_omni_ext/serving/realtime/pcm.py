"""Converts sound of the Realtime API from encoded bytes to float samples at a model's rate, and back.

Both directions are streams. The size of the pieces does not change the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from vllm_omni_ext.errors import RequestError
from vllm_omni_ext.modalities.sound import SAMPLE_BYTES, Samples, pcm16

PCM, PCMU, PCMA = "audio/pcm", "audio/pcmu", "audio/pcma"

RATES: Mapping[str, int] = {PCM: 24_000, PCMU: 8_000, PCMA: 8_000}
"""The only sample rate of each format, in Hz."""

FULL_SCALE = 2**15
FILTER_SAMPLES = 256
"""Number of zeros that are appended to a sound before it is resampled.

FFmpeg's filter is shorter at all ratios of rates that occur here. Without the zeros, FFmpeg drops the last sample."""


@dataclass(frozen=True)
class SoundFormat:
    """Encoding of mono sound.

    Attributes:
        type: one of `RATES`.
        rate: samples per second.
    """

    type: str = PCM
    rate: int = RATES[PCM]

    @property
    def sample_bytes(self) -> int:
        """Number of bytes of a sample."""
        return SAMPLE_BYTES if self.type == PCM else 1

    def as_json(self) -> dict[str, Any]:
        """Return the format as an object of the Realtime API; it contains `rate` only for PCM."""
        return {"type": self.type, "rate": self.rate} if self.type == PCM else {"type": self.type}


def read_format(value: Any, parameter: str) -> SoundFormat:
    """Return the format that an object of the API, e.g. `{"type": "audio/pcm", "rate": 24000}`, describes.

    Args:
        parameter: the object's path in the client's message, for errors.

    Raises:
        RequestError: `value` is not an object, or its type, a field or its rate is unknown.
    """
    if not isinstance(value, Mapping):
        raise RequestError(f"{parameter}: must be an object with 'type', got {value!r}", parameter=parameter)
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in RATES:
        allowed = ", ".join(RATES)
        raise RequestError(f"{parameter}.type: must be one of {allowed}, got {kind!r}", parameter=f"{parameter}.type")
    if unknown := sorted(map(str, value.keys() - {"type", "rate"})):
        raise RequestError(f"{parameter}.{unknown[0]}: no such field", parameter=f"{parameter}.{unknown[0]}")
    rate = value.get("rate", RATES[kind])
    if isinstance(rate, bool) or rate != RATES[kind]:
        raise RequestError(
            f"{parameter}.rate: must be {RATES[kind]} for {kind}, got {rate!r}", parameter=f"{parameter}.rate"
        )
    return SoundFormat(kind, RATES[kind])


class Decoder:
    """Converts bytes of `format` to float32 samples [n] in [-1, 1] at `rate` Hz."""

    def __init__(self, format: SoundFormat, rate: int) -> None:
        self._format, self._rest = format, b""
        self._resampler = Resampler(format.rate, rate)

    def write(self, data: bytes, *, last: bool = False) -> Samples:
        """Decode the next bytes, and return the samples that are complete.

        The first byte of an incomplete sample, and up to 4 ms of samples in the resampler, stay until the next call.

        Args:
            last: the sound ends with `data`. All samples are returned, and the next call begins another sound.

        Raises:
            ValueError: the sound ends with half a sample. The next call begins another sound.
        """
        data = self._rest + data
        whole = len(data) - len(data) % self._format.sample_bytes
        data, self._rest = data[:whole], data[whole:]
        samples = self._resampler.write(_decoded(data, self._format.type), last=last)
        if last and self._rest:
            self._rest = b""
            raise ValueError(f"the sound ends with half a sample of {self._format.sample_bytes} bytes")
        return samples


class Encoder:
    """Converts float32 samples [n] in [-1, 1] at `rate` Hz to bytes of `format`; louder samples are clipped."""

    def __init__(self, format: SoundFormat, rate: int) -> None:
        self._format = format
        self._resampler = Resampler(rate, format.rate)

    def write(self, samples: Samples, *, last: bool) -> bytes:
        """Encode the next samples, and return the bytes that are complete. For `last` see `Decoder.write`."""
        data = pcm16(self._resampler.write(np.asarray(samples, np.float32), last=last))
        if self._format.type == PCM:
            return data
        return _codes(self._format.type)[np.frombuffer(data, "<u2")].tobytes()


class Resampler:
    """Converts a stream of float32 samples from one rate to another with FFmpeg's filter.

    For n input samples, all calls together return ceil(n * target / source) samples.
    """

    def __init__(self, source_hz: int, target_hz: int) -> None:
        self._source, self._target = source_hz, target_hz
        self._read = self._written = 0
        self._filter: Any = None

    def write(self, samples: Samples, *, last: bool = False) -> Samples:
        """Convert the next samples, float32 [n], and return those at the target rate that are complete, float32 [m].

        Args:
            last: no samples follow: also return the samples that are still in the filter, and reset the filter.
        """
        if self._source == self._target:
            return samples
        self._read += len(samples)
        if last and self._read:
            samples = np.concatenate([samples, np.zeros(FILTER_SAMPLES, np.float32)])
        converted = self._convert(samples, last=last)
        if last:
            converted = converted[: -(-self._read * self._target // self._source) - self._written]
            self._filter, self._read, self._written = None, 0, 0
        else:
            self._written += len(converted)
        return converted

    def _convert(self, samples: Samples, *, last: bool) -> Samples:
        import av

        if self._filter is None:
            self._filter = av.AudioResampler(format="flt", layout="mono", rate=self._target)
        frames = []
        if len(samples):
            frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples)[None], format="flt", layout="mono")
            frame.sample_rate = self._source
            frames += self._filter.resample(frame)
        if last and self._read:
            frames += self._filter.resample(None)
        return np.concatenate([np.zeros(0, np.float32), *(frame.to_ndarray()[0] for frame in frames)])


def _decoded(data: bytes, kind: str) -> Samples:
    if kind == PCM:
        return np.frombuffer(data, "<i2").astype(np.float32) / np.float32(FULL_SCALE)
    return _levels(kind)[np.frombuffer(data, np.uint8)].astype(np.float32) / np.float32(FULL_SCALE)


@cache
def _levels(kind: str) -> Samples:
    """Return the 16-bit sample of each of the 256 codes of G.711, int16 [256]."""
    codes = np.arange(256)
    if kind == PCMU:
        codes = codes ^ 0xFF
        exponent, step = codes >> 4 & 7, codes & 15
        size = (2 * step + 33 << exponent + 2) - 132
        return np.where(codes & 0x80, -size, size).astype(np.int16)
    codes = codes ^ 0x55
    exponent, step = codes >> 4 & 7, codes & 15
    size = np.where(exponent == 0, 2 * step + 1 << 3, 2 * step + 33 << np.maximum(exponent, 1) + 2)
    return np.where(codes & 0x80, size, -size).astype(np.int16)


@cache
def _codes(kind: str) -> Samples:
    """Return the G.711 byte of each 16-bit sample, uint8 [65536], indexed by the sample's unsigned value."""
    samples = np.arange(2**16).astype(np.uint16).view(np.int16).astype(np.int64)
    if kind == PCMU:
        negative, size = samples < 0, np.minimum(np.abs(samples >> 2), 8158) + 33
        exponent = _bits(size) - 6
        code = (negative << 7 | exponent << 4 | size >> exponent + 1 & 15) ^ 0xFF
    else:
        negative, size = samples < 0, samples >> 3
        size = np.where(negative, ~size, size)
        exponent = np.maximum(_bits(size) - 5, 0)
        code = (~negative << 7 | exponent << 4 | size >> np.maximum(exponent, 1) & 15) ^ 0x55
    return code.astype(np.uint8)


def _bits(values: Samples) -> Samples:
    """Return the bit length of each integer >= 0 in `values`."""
    return np.frexp(values.astype(np.float64))[1].astype(np.int64)
