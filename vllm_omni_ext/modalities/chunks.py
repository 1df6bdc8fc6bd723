"""Output chunks of the core's modalities: text, audio and image. Imports only numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from vllm_omni_ext.modalities.base import AUDIO, IMAGE, TEXT, OutputChunk


@dataclass(frozen=True, kw_only=True)
class TextChunk(OutputChunk):
    """Text that a stage other than the frontend generated.

    Attributes:
        text: the text since the preceding chunk.
        tokens: number of tokens since the preceding chunk.
    """

    modality: ClassVar[str] = TEXT
    text: str
    tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class AudioChunk(OutputChunk):
    """A piece of sound.

    Attributes:
        samples: float32 [samples] in [-1, 1], mono; may be empty.
        sample_rate: Hz.
        frames: codec frames since the start of the sound, int64 [frames, code groups]; None: the model has none.
        note: the reason for missing sound; None: no sound is missing.
    """

    modality: ClassVar[str] = AUDIO
    samples: np.ndarray[Any, Any]
    sample_rate: int
    frames: np.ndarray[Any, Any] | None = None
    note: str | None = None


@dataclass(frozen=True, kw_only=True)
class ImageChunk(OutputChunk):
    """A picture.

    Attributes:
        pixels: uint8 [height, width, 3], RGB.
        index: number of the picture in the answer, from 0.
        partial: the chunk is a preview, and the finished picture follows.
        latent: the model's latent of the picture, float32; None if not requested.
        seed: seed of the picture's generation, with which it can be reproduced.
    """

    modality: ClassVar[str] = IMAGE
    pixels: np.ndarray[Any, Any]
    index: int = 0
    partial: bool = False
    latent: np.ndarray[Any, Any] | None = None
    seed: int | None = None
