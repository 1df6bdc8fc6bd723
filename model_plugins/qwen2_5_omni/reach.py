"""How far BigVGAN's convolutions reach, and the windows in which it decodes. Pure."""

from __future__ import annotations

from typing import Any

ACTIVATION_REACH = 6
"""Samples on each side that an anti-aliased activation reads: its filters have 12 taps at twice the rate."""

MOST_WINDOW_FRAMES = 256
"""Most mel frames in the middle of a window. They determine the activation memory of BigVGAN."""


def reach(config: Any) -> int:
    """Return how many mel frames on each side a sample of BigVGAN depends on, or a few more."""
    kernels = zip(config.resblock_kernel_sizes, config.resblock_dilation_sizes, strict=True)
    block = max(
        sum(2 * ACTIVATION_REACH + (kernel // 2) * (dilation + 1) for dilation in dilations)
        for kernel, dilations in kernels
    )
    samples = ACTIVATION_REACH + 3  # the last convolution has 7 taps, as the first
    for rate, kernel in zip(reversed(config.upsample_rates), reversed(config.upsample_kernel_sizes), strict=True):
        samples = -(-(samples + block + kernel) // rate)
    return samples + 3
