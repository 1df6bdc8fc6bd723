"""Sound in the encoding that the client sends, and the input audio buffer."""

from __future__ import annotations

import base64
import binascii
import secrets
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from typing import Any

from vllm_omni_ext.serving.realtime.events import WRONG_VALUE, ClientError

BYTES_PER_MS = {"audio/pcm": 48, "audio/pcmu": 8, "audio/pcma": 8}
SAMPLE_BYTES = {"audio/pcm": 2, "audio/pcmu": 1, "audio/pcma": 1}
SILENCE = {"audio/pcm": b"\0", "audio/pcmu": b"\xff", "audio/pcma": b"\xd5"}
"""The byte that encodes silence in each format."""

_SECRET = secrets.token_bytes(32)
"""Key of the hash that is a sound's name in media caches. Clients, which can choose names of media (`uuid`), cannot
compute the name of another client's sound."""

SHORTEST_MS = 100
"""Least length of a committed buffer, in milliseconds: audio encoders have no output for shorter sound."""


@dataclass(frozen=True, kw_only=True)
class Sound:
    """Encoded sound in a format of the protocol.

    Attributes:
        data: the encoded bytes.
        format: e.g. {"type": "audio/pcm", "rate": 24000}.
    """

    data: bytes
    format: dict[str, Any]

    @cached_property
    def name(self) -> str:
        """The sound's name in media caches: equal sounds of this process have equal names."""
        return blake2b(self.data, key=_SECRET, digest_size=32, person=self.format["type"].encode()).hexdigest()

    @property
    def ms(self) -> float:
        """Duration in milliseconds."""
        return len(self.data) / BYTES_PER_MS[self.format["type"]]

    def at_least(self, ms: float) -> Sound:
        """Return the sound, extended with silence at its end to a length of at least `ms`."""
        kind = self.format["type"]
        lacking = round(ms * BYTES_PER_MS[kind]) - len(self.data)
        return self if lacking <= 0 else replace(self, data=self.data + SILENCE[kind] * lacking)


def decoded(audio: str, sound_format: dict[str, Any], path: str) -> bytes:
    """Return the sound bytes of a client's base64 text, which is at `path` in the client's event.

    Raises:
        ClientError: the text is not base64, or the sound ends within a sample.
    """
    try:
        data = base64.b64decode(audio, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ClientError(f"{path}: must be base64: {error}", code=WRONG_VALUE, param=path) from error
    size = SAMPLE_BYTES[sound_format["type"]]
    if len(data) % size:
        raise ClientError(f"{path}: must have whole samples of {size} bytes", code=WRONG_VALUE, param=path)
    return data


class InputBuffer:
    """The input audio buffer of a session.

    All times are positions, in milliseconds, in the sound that the client has sent since the session's start.

    Args:
        sound_format: format of the sound that is appended.
        most: largest number of bytes in the buffer.
    """

    def __init__(self, sound_format: dict[str, Any], most: int) -> None:
        self._most = most
        self._data = bytearray()
        self._start_ms = 0.0
        self.use(sound_format)

    def use(self, sound_format: dict[str, Any]) -> None:
        """Set the format. If the format changes, the buffer must be empty."""
        self._format = sound_format
        self._rate = BYTES_PER_MS[sound_format["type"]]
        self._sample = SAMPLE_BYTES[sound_format["type"]]

    def __len__(self) -> int:
        """Return the number of bytes in the buffer."""
        return len(self._data)

    @property
    def start_ms(self) -> float:
        """Time of the first sample in the buffer."""
        return self._start_ms

    @property
    def end_ms(self) -> float:
        """Time at the end of the last sample in the buffer."""
        return self._start_ms + len(self._data) / self._rate

    def must_empty_for(self, data: bytes) -> bool:
        """Return whether `append` refuses the sound now, and accepts it if the buffer is empty."""
        return len(self._data) + len(data) > self._most >= len(data)

    def make_room_for(self, data: bytes) -> None:
        """Remove the oldest sound, as much as `append` needs; `must_empty_for` has returned True."""
        lacking = len(self._data) + len(data) - self._most
        self._drop(lacking + lacking % self._sample)

    def append(self, data: bytes) -> None:
        """Append sound.

        Raises:
            ClientError: the buffer would exceed its limit; no sound is appended.
        """
        if len(self._data) + len(data) > self._most:
            raise ClientError(
                f"the input audio buffer may have {self._most} bytes; commit or clear it",
                code="input_audio_buffer_full",
                param="audio",
            )
        self._data += data

    def clear(self) -> None:
        """Remove all sound."""
        self._start_ms = self.end_ms
        self._data.clear()

    def peek(self) -> Sound:
        """Return all sound in the buffer, without removal."""
        return Sound(data=bytes(self._data), format=self._format)

    def drop_before(self, at_ms: float) -> None:
        """Remove the sound before `at_ms`."""
        self._drop(self._offset(at_ms))

    def take(self, from_ms: float | None = None, to_ms: float | None = None) -> Sound:
        """Remove the sound before `to_ms`, and return the part of it from `from_ms` on.

        Args:
            from_ms: None: from the start of the buffer.
            to_ms: None: to the end of the buffer.
        """
        first = 0 if from_ms is None else self._offset(from_ms)
        last = len(self._data) if to_ms is None else self._offset(to_ms)
        sound = Sound(data=bytes(self._data[first : max(first, last)]), format=self._format)
        self._drop(max(first, last))
        return sound

    def _offset(self, at_ms: float) -> int:
        samples = round((at_ms - self._start_ms) * self._rate / self._sample)
        return min(max(0, samples * self._sample), len(self._data))

    def _drop(self, size: int) -> None:
        del self._data[:size]
        self._start_ms += size / self._rate
