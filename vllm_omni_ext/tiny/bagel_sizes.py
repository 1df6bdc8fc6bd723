"""Sizes of the tiny BAGEL checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

AUTOENCODER: Mapping[str, Any] = {
    "resolution": 64,
    "in_channels": 3,
    "downsample": 8,
    "ch": 32,
    "out_ch": 3,
    "ch_mult": [1, 1, 1, 1],
    "num_res_blocks": 1,
    "z_channels": 16,
    "scale_factor": 0.3611,
    "shift_factor": 0.1159,
}
"""Widths of the autoencoder; the released checkpoint does not write them down."""


@dataclass(frozen=True, slots=True)
class BagelSizes:
    """Sizes of a checkpoint; the defaults are those of the tiny one.

    Attributes:
        latent_side: rows and columns of the table of latent positions.
        vit_side: rows and columns of the tables of patch positions.
        vae_transform: largest and smallest side in pixels, and what sides are multiples of, for the autoencoder.
        vit_transform: the same for the ViT.
    """

    hidden: int = 64
    feed_forward: int = 128
    layers: int = 3
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 32
    vocabulary: int = 384
    vit_hidden: int = 64
    vit_feed_forward: int = 96
    vit_heads: int = 2
    vit_layers: int = 2
    vit_patch: int = 14
    vit_side: int = 8
    latent_side: int = 16
    latent_patch: int = 2
    vae_transform: tuple[int, int, int] = (96, 48, 16)
    vit_transform: tuple[int, int, int] = (112, 42, 14)
