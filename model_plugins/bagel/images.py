"""Pictures in and out: colours, the two resizes, patches, and numbers to bytes."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vllm_omni_ext.model_plugins.bagel.sizes import ResizeRule

MAX_PIXELS = 14 * 14 * 9 * 1024
"""Most pixels of a resized picture, about."""


def to_rgb(picture: Image.Image) -> Image.Image:
    """The picture in RGB; what is transparent in RGBA, or by a transparent colour, is laid over white."""
    if picture.mode == "RGBA" or picture.info.get("transparency") is not None:
        picture = picture.convert("RGBA")
        white = Image.new("RGB", picture.size, (255, 255, 255))
        white.paste(picture, mask=picture.getchannel("A"))
        return white
    return picture.convert("RGB")


def resized_size(width: int, height: int, rule: ResizeRule) -> tuple[int, int]:
    """Width and height that a picture of this size gets, in pixels.

    The longest side is brought below the limit, then the shortest one above it (which wins); both are rounded to
    multiples of the stride. A picture that has too many pixels, or is too long, after that is made smaller again.
    """
    scale = min(rule.longest / max(width, height), 1.0)
    scale = max(scale, rule.shortest / min(width, height))
    width, height = _scaled(width, height, scale, rule.stride)
    if width * height > MAX_PIXELS:
        width, height = _scaled(width, height, MAX_PIXELS / (width * height), rule.stride)
    if max(width, height) > rule.longest:
        width, height = _scaled(width, height, rule.longest / max(width, height), rule.stride)
    return width, height


def _scaled(width: int, height: int, scale: float, stride: int) -> tuple[int, int]:
    return _rounded(round(width * scale), stride), _rounded(round(height * scale), stride)


def _rounded(value: int, stride: int) -> int:
    return max(stride, round(value / stride) * stride)


def resize(picture: Image.Image, rule: ResizeRule) -> Image.Image:
    """The picture at `resized_size`; bicubic."""
    size = resized_size(*picture.size, rule)
    return picture if size == picture.size else picture.resize(size, Image.Resampling.BICUBIC)


def to_pixels(picture: Image.Image) -> Tensor:
    """An RGB picture as `[3, height, width]` float32 from -1 to 1."""
    numbers = torch.from_numpy(np.array(picture, dtype=np.uint8)).permute(2, 0, 1)
    return (numbers.float() / 255 - 0.5) / 0.5


def to_patches(pixels: Tensor, patch: int) -> Tensor:
    """`[3, height, width]` -> `[patches, patch * patch * 3]`; patches by row, each in (row, column, channel) order."""
    rows = pixels.unflatten(2, (-1, patch)).unflatten(1, (-1, patch))
    return rows.permute(1, 3, 2, 4, 0).flatten(2).flatten(0, 1)


def places(rows: int, columns: int, side: int) -> Tensor:
    """Places of a grid in a table with `side` columns: `[rows * columns]` int64."""
    return (torch.arange(rows)[:, None] * side + torch.arange(columns)).flatten()


def to_tokens(latents: Tensor, patch: int) -> Tensor:
    """`[channels, rows * patch, columns * patch]` -> `[rows * columns, patch * patch * channels]`."""
    return to_patches(latents, patch)


def to_latents(tokens: Tensor, rows: int, patch: int) -> Tensor:
    """The inverse of `to_tokens`, for a grid of so many rows."""
    grid = tokens.unflatten(1, (patch, patch, -1)).unflatten(0, (rows, -1))
    return grid.permute(4, 0, 2, 1, 3).flatten(3).flatten(1, 2)


def to_bytes(pixels: Tensor) -> Tensor:
    """`[3, height, width]` about -1 to 1 -> `[height, width, 3]` uint8: clamped, and cut off rather than rounded."""
    return ((pixels * 0.5 + 0.5).clamp(0, 1).permute(1, 2, 0) * 255).to(torch.uint8)
