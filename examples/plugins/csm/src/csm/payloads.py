"""Messages of the flow to the stages, and parameters of the codec."""

import msgspec

BACKBONE, CODEC = "backbone", "codec"
FRAME = -1
"""Id in `Prompt.text` of a position whose input is the next frame of `Prompt.audio`."""


class Prompt(msgspec.Struct, frozen=True, kw_only=True, tag="prompt"):
    """The prompt of an utterance: ids of its text, frames of its reference sound, and the frames made so far."""

    text: list[int]
    audio: list[list[int]] = []
    frames: list[list[int]] = []


class Encode(msgspec.Struct, frozen=True, kw_only=True, tag="encode"):
    """A sound to encode: float32 in bytes, mono, at the codec's rate. Its answer is int32 [frames, codebooks]."""

    samples: bytes


class CodecParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The codec has no parameters, so a request that sets one is refused."""
