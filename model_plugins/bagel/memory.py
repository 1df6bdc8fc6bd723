"""Computes the memory of a request before it runs, so that a scheduler can limit the running requests. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from vllm_omni_ext.model_plugins.bagel import images
from vllm_omni_ext.model_plugins.bagel.prompts import MARKERS, Segments
from vllm_omni_ext.model_plugins.bagel.sizes import BagelSizes, LlmSizes

FLOAT32_BYTES = 4

STEP_HIDDEN = 6
"""Number of tensors `[tokens, hidden]` that are alive at the same time: hidden state, residual, their normed copies,
the step's embeddings, attended values."""

VAE_TENSORS = 4
"""Tensors of the size of the decoder's largest activation that are alive at the same time."""


def step_elements(sizes: LlmSizes) -> tuple[int, int]:
    """Return the elements of a step's activations for each token: (whole ones, those that tensor parallelism divides).

    The divided ones are queries, keys and values, twice for RoPE, and the MLP.
    """
    return STEP_HIDDEN * sizes.hidden, 2 * (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim + 3 * sizes.feed_forward


def autoencoder_elements(sizes: BagelSizes) -> int:
    """Return the elements of the autoencoder's activations for the largest picture.

    They are float32: each counts as two elements of 16 bits.
    """
    return 2 * VAE_TENSORS * sizes.vae_resize.longest**2 * max(sizes.vae.widths[:2])


def kv_bytes_per_token(sizes: LlmSizes, element_bytes: int) -> int:
    """Return the bytes of one token's keys and values in all layers; `element_bytes`: 2 for bfloat16, 4 for float32."""
    return 2 * sizes.layers * sizes.kv_heads * sizes.head_dim * element_bytes


def image_tokens(sizes: BagelSizes, height: int, width: int) -> int:
    """Return the number of tokens of a generated image of this size in pixels, including its markers."""
    return (height // sizes.token_pixels) * (width // sizes.token_pixels) + MARKERS


def picture_tokens(sizes: BagelSizes, height: int, width: int, *, latents: bool) -> int:
    """Return the number of tokens that a picture adds to a context, including markers.

    Args:
        sizes: sizes of the model.
        height, width: size of the picture in pixels, before any resize.
        latents: True: the picture is edited (tokens of autoencoder and ViT). False: it is only read (ViT).
    """
    width, height = images.resized_size(width, height, sizes.vae_resize)
    tokens = patch_tokens(sizes, height, width)
    return tokens + latent_tokens(sizes, height, width) if latents else tokens


def patch_tokens(sizes: BagelSizes, height: int, width: int) -> int:
    """Return the number of a picture's ViT tokens, including markers, from its size after `vae_resize`."""
    columns, rows = (side // sizes.vit.patch for side in images.resized_size(width, height, sizes.vit_resize))
    return rows * columns + MARKERS


def latent_tokens(sizes: BagelSizes, height: int, width: int) -> int:
    """Return the number of a picture's latent tokens, including markers, from its size after `vae_resize`.

    `vae_resize` is applied a second time, as in `Prompts.latents`.
    """
    columns, rows = (side // sizes.token_pixels for side in images.resized_size(width, height, sizes.vae_resize))
    return rows * columns + MARKERS


def context_tokens(branches: Iterable[Segments]) -> int:
    """Return the number of tokens whose keys and values the branches of a request store.

    A common beginning of several branches is stored once.

    Args:
        branches: prompt of each branch, as segments.
    """
    prefixes = {branch[:end] for branch in branches for end in range(1, len(branch) + 1)}
    return sum(prefix[-1].length for prefix in prefixes)
