"""Converts pictures to and from the model's tensors: colours, resizing, patches, and bytes."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vllm_omni_ext.model_plugins.bagel.sizes import ResizeRule

MAX_PIXELS = 14 * 14 * 9 * 1024
"""Approximate limit of the number of pixels of a resized picture."""


def to_rgb(picture: Image.Image) -> Image.Image:
    """Return the picture in RGB; transparent areas (alpha channel, or a transparent colour) become white."""
    if picture.mode == "RGBA" or picture.info.get("transparency") is not None:
        picture = picture.convert("RGBA")
        white = Image.new("RGB", picture.size, (255, 255, 255))
        white.paste(picture, mask=picture.getchannel("A"))
        return white
    return picture.convert("RGB")


def resized_size(width: int, height: int, rule: ResizeRule) -> tuple[int, int]:
    """Return width and height of a resized picture in pixels.

    The longest side is reduced to its limit, then the shortest side is raised to its limit, which has priority. Both
    are rounded to multiples of the stride. A picture that still exceeds `MAX_PIXELS` or the longest side is reduced
    again.
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
    width, height = (max(stride, round(round(side * scale) / stride) * stride) for side in (width, height))
    return width, height


def resize(picture: Image.Image, rule: ResizeRule) -> Image.Image:
    """Return the picture resized to `resized_size`, with bicubic interpolation."""
    size = resized_size(*picture.size, rule)
    return picture if size == picture.size else picture.resize(size, Image.Resampling.BICUBIC)


def to_pixels(picture: Image.Image) -> Tensor:
    """Convert an RGB picture to `[3, height, width]` float32 from -1 to 1."""
    return bytes_to_pixels(torch.from_numpy(np.array(picture, dtype=np.uint8)))


def bytes_to_pixels(numbers: Tensor) -> Tensor:
    """Convert `[height, width, 3]` uint8 to `[3, height, width]` float32 from -1 to 1, on the same device."""
    return (numbers.permute(2, 0, 1).float() / 255 - 0.5) / 0.5


def to_patches(pixels: Tensor, patch: int) -> Tensor:
    """Divide a picture, or latents, `[channels, height, width]` into `[patches, patch * patch * channels]`.

    The patches are in row order; the elements of a patch are in (row, column, channel) order.
    """
    rows = pixels.unflatten(2, (-1, patch)).unflatten(1, (-1, patch))
    return rows.permute(1, 3, 2, 4, 0).flatten(2).flatten(0, 1)


def places(rows: int, columns: int, side: int) -> Tensor:
    """Return the indices of a grid's cells in a flattened square table, `[rows * columns]` int64, in row order.

    The grid is the table's upper left corner; `side` is the number of the table's columns.
    """
    return (torch.arange(rows)[:, None] * side + torch.arange(columns)).flatten()


def to_latents(tokens: Tensor, rows: int, patch: int) -> Tensor:
    """Convert latent tokens to latents; the inverse of `to_patches`.

    Args:
        tokens: `[patches, patch * patch * channels]`.
        rows: number of rows of patches.
        patch: side of a patch.

    Returns:
        `[channels, height, width]`.
    """
    grid = tokens.unflatten(1, (patch, patch, -1)).unflatten(0, (rows, -1))
    return grid.permute(4, 0, 2, 1, 3).flatten(3).flatten(1, 2)


def to_bytes(pixels: Tensor) -> Tensor:
    """Convert `[3, height, width]` from -1 to 1 to `[height, width, 3]` uint8: clamped, and truncated, not rounded."""
    return ((pixels * 0.5 + 0.5).clamp(0, 1).permute(1, 2, 0) * 255).to(torch.uint8)
