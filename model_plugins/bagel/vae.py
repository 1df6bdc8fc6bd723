"""FLUX's autoencoder between pixels and latents. Its submodules have the names of the checkpoint."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm_omni_ext.model_plugins.bagel.sizes import VaeSizes

_GROUPS = 32
_EPSILON = 1e-6


def _norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(_GROUPS, channels, eps=_EPSILON)


class Residual(nn.Module):
    """Two convolutions with a residual connection."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm1 = _norm(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm2 = _norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        if inputs != outputs:
            self.nin_shortcut = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h)))
        return h + (self.nin_shortcut(x) if hasattr(self, "nin_shortcut") else x)


class PixelAttention(nn.Module):
    """Single-head attention between all positions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = _norm(channels)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(channels, channels, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        query, key, value = (conv(h).flatten(2).transpose(1, 2)[:, None] for conv in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(query, key, value)
        return x + self.proj_out(attended[:, 0].transpose(1, 2).unflatten(2, x.shape[2:]))


class Middle(nn.Module):
    """The layers at the lowest resolution: two residual blocks with attention between them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.block_1 = Residual(channels, channels)
        self.attn_1 = PixelAttention(channels)
        self.block_2 = Residual(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.block_2(self.attn_1(self.block_1(x)))


class Downsample(nn.Module):
    """Halves height and width, with zero padding only at the bottom and on the right."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (0, 1, 0, 1)))


class Upsample(nn.Module):
    """Doubles height and width."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class Level(nn.Module):
    """Residual blocks of one resolution, followed by the resampling to the next resolution."""

    def __init__(self, inputs: int, outputs: int, blocks: int) -> None:
        super().__init__()
        self.block = nn.ModuleList(Residual(inputs if at == 0 else outputs, outputs) for at in range(blocks))
        self.downsample: nn.Module = nn.Identity()
        self.upsample: nn.Module = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.block:
            x = block(x)
        return self.upsample(self.downsample(x))


class Encoder(nn.Module):
    """Maps pixels to the mean and log variance of latents."""

    def __init__(self, sizes: VaeSizes) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(3, sizes.width, 3, padding=1)
        inputs = (sizes.width, *sizes.widths)
        self.down = nn.ModuleList(Level(i, o, sizes.blocks) for i, o in zip(inputs, sizes.widths, strict=False))
        for level in list(self.down)[:-1]:
            level.downsample = Downsample(level.block[-1].conv2.out_channels)
        self.mid = Middle(sizes.widths[-1])
        self.norm_out = _norm(sizes.widths[-1])
        self.conv_out = nn.Conv2d(sizes.widths[-1], 2 * sizes.channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for level in self.down:
            x = level(x)
        return self.conv_out(F.silu(self.norm_out(self.mid(x))))


class Decoder(nn.Module):
    """Maps latents to pixels."""

    def __init__(self, sizes: VaeSizes) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(sizes.channels, sizes.widths[-1], 3, padding=1)
        self.mid = Middle(sizes.widths[-1])
        inputs = (*sizes.widths[1:], sizes.widths[-1])
        levels = zip(inputs, sizes.widths, strict=True)
        self.up = nn.ModuleList(Level(i, o, sizes.blocks + 1) for i, o in levels)
        for level in list(self.up)[1:]:
            level.upsample = Upsample(level.block[-1].conv2.out_channels)
        self.norm_out = _norm(sizes.widths[0])
        self.conv_out = nn.Conv2d(sizes.widths[0], 3, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        x = self.mid(self.conv_in(z))
        for level in reversed(list(self.up)):
            x = level(x)
        return self.conv_out(F.silu(self.norm_out(x)))


class Autoencoder(nn.Module):
    """The autoencoder: encoder and decoder, always in float32."""

    def __init__(self, sizes: VaeSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.encoder = Encoder(sizes)
        self.decoder = Decoder(sizes)

    def encode(self, pixels: Tensor, noise: Tensor) -> Tensor:
        """Sample the latents of pictures.

        Args:
            pixels: `[pictures, 3, height, width]` from -1 to 1.
            noise: standard normal numbers, `[pictures, channels, height / downsample, width / downsample]`.

        Returns:
            Latents in the shape of `noise`.
        """
        mean, log_variance = self.encoder(pixels).chunk(2, dim=1)
        return self.sizes.scale * (mean + torch.exp(0.5 * log_variance) * noise - self.sizes.shift)

    def decode(self, latents: Tensor) -> Tensor:
        """Return pixels `[images, 3, h * downsample, w * downsample]`, about -1 to 1, of `[images, channels, h, w]`."""
        return self.decoder(latents / self.sizes.scale + self.sizes.shift)
