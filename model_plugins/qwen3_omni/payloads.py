"""Messages of the flow to the talker's worker. Pure."""

from __future__ import annotations

import msgspec


class TalkerPrompt(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="prompt"):
    """The message that opens a request in the talker.

    Attributes:
        text: text ids of the known prompt positions (MULTIMODAL where the input is a hidden state).
        codec: codec ids of all prompt positions (NO_CODEC where there is none).
        fill: text id that is the input after the end of the track.
        track: text ids that are added to the frames, one per step.
        positions: int32 M-RoPE positions [3, prompt length], row-major, of a multimodal prompt.
        frames: frames that were made on another replica, each of `code groups` codes.
    """

    text: list[int]
    codec: list[int]
    fill: int
    track: list[int] = []
    positions: bytes | None = None
    frames: list[list[int]] = []


class TalkerChunk(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="chunk"):
    """More input for an open request: `text` ids of the missing part of its prompt, then `track` ids."""

    text: tuple[int, ...] = ()
    track: tuple[int, ...] = ()


TalkerPayload = TalkerPrompt | TalkerChunk
