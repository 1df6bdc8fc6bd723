"""Chunks of the core's modalities. Pure except for numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from vllm_omni_ext.modalities.base import AUDIO, IMAGE, TEXT, OutputChunk


@dataclass(frozen=True, kw_only=True)
class TextChunk(OutputChunk):
    """Text that a stage other than the frontend generated.

    Attributes:
        text: the new text since the last chunk.
        tokens: number of new tokens.
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
        frames: all codec frames spoken so far, int64 [frames, code groups]; None if the model has no codec frames.
        note: the reason for missing sound, else None.
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
        partial: a preview; the picture itself follows.
        latent: float32, the model's latent of the picture, if requested.
        seed: the seed with which the picture can be made again.
    """

    modality: ClassVar[str] = IMAGE
    pixels: np.ndarray[Any, Any]
    index: int = 0
    partial: bool = False
    latent: np.ndarray[Any, Any] | None = None
    seed: int | None = None
