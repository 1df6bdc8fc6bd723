"""Computes on how many mel frames a sample of BigVGAN depends; size of the windows that BigVGAN decodes. Pure."""

from __future__ import annotations

from typing import Any

ACTIVATION_REACH = 6
"""Samples on each side that an anti-aliased activation reads: its filters have 12 taps at twice the rate."""

MOST_WINDOW_FRAMES = 256
"""Most mel frames of a window without its margins, i.e. frames whose samples one call of BigVGAN returns. They
determine the activation memory of BigVGAN."""


def reach(config: Any) -> int:
    """Return how many mel frames on each side a sample of BigVGAN depends on; the number may be a few too large.

    Args:
        config: a checkpoint's `token2wav_config.bigvgan_config`.
    """
    kernels = zip(config.resblock_kernel_sizes, config.resblock_dilation_sizes, strict=True)
    block = max(
        sum(2 * ACTIVATION_REACH + (kernel // 2) * (dilation + 1) for dilation in dilations)
        for kernel, dilations in kernels
    )
    samples = ACTIVATION_REACH + 3  # the last convolution has 7 taps, as the first
    for rate, kernel in zip(reversed(config.upsample_rates), reversed(config.upsample_kernel_sizes), strict=True):
        samples = -(-(samples + block + kernel) // rate)
    return samples + 3
