"""Sizes of the tiny BAGEL checkpoint, and of the released one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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
"""Configuration of the tiny autoencoder; the released configs do not contain one."""


@dataclass(frozen=True, slots=True)
class BagelSizes:
    """Sizes of a checkpoint; the defaults are those of the tiny one.

    Attributes:
        longest: `max_position_embeddings`.
        latent_side: rows and columns of the table of latent positions.
        vit_side: rows and columns of the tables of patch positions.
        vae_transform: largest side, smallest side and stride (divisor of both sides) in pixels, for the autoencoder.
        vit_transform: the same for the ViT.
        autoencoder: `vae_config` in `config.json`.
    """

    hidden: int = 64
    feed_forward: int = 128
    layers: int = 3
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 32
    vocabulary: int = 384
    longest: int = 2048
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
    autoencoder: Mapping[str, Any] = field(default_factory=lambda: AUTOENCODER)


RELEASED = BagelSizes(
    hidden=3584,
    feed_forward=18944,
    layers=28,
    heads=28,
    kv_heads=4,
    head_dim=128,
    vocabulary=152064,
    longest=32768,
    vit_hidden=1152,
    vit_feed_forward=4304,
    vit_heads=16,
    vit_layers=26,
    vit_side=70,
    latent_side=64,
    vae_transform=(1024, 512, 16),
    vit_transform=(980, 224, 14),
    autoencoder={**AUTOENCODER, "resolution": 256, "ch": 128, "ch_mult": [1, 2, 4, 4], "num_res_blocks": 2},
)
"""Sizes of BAGEL-7B-MoT."""
