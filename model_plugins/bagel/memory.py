"""How much a request needs, before anything of it is computed: what a scheduler admits requests by. Pure numbers."""

from __future__ import annotations

from collections.abc import Iterable

from vllm_omni_ext.model_plugins.bagel import images
from vllm_omni_ext.model_plugins.bagel.guidance import branch_names
from vllm_omni_ext.model_plugins.bagel.parameters import ImageParameters
from vllm_omni_ext.model_plugins.bagel.prompts import MARKERS, ImagePlan, Segments
from vllm_omni_ext.model_plugins.bagel.sizes import BagelSizes, LlmSizes

FLOAT32_BYTES = 4


def kv_bytes_per_token(sizes: LlmSizes, element_bytes: int) -> int:
    """Bytes of one token's keys and values in all layers; `element_bytes` is 2 for bfloat16, 4 for float32."""
    return 2 * sizes.layers * sizes.kv_heads * sizes.head_dim * element_bytes


def image_tokens(sizes: BagelSizes, height: int, width: int) -> int:
    """Tokens of the block that is denoised for an image of that size in pixels, its markers included."""
    return (height // sizes.token_pixels) * (width // sizes.token_pixels) + MARKERS


def picture_tokens(sizes: BagelSizes, height: int, width: int, *, latents: bool) -> int:
    """Tokens that a picture adds to a context, markers included; the size is that before any resize.

    Args:
        sizes: of the model.
        height, width: of the picture in pixels.
        latents: whether it is edited (autoencoder and ViT), not only looked at (ViT).
    """
    size = images.resized_size(width, height, sizes.vae_resize)
    columns, rows = (side // sizes.vit.patch for side in images.resized_size(*size, sizes.vit_resize))
    tokens = rows * columns + MARKERS
    if latents:
        columns, rows = (side // sizes.token_pixels for side in images.resized_size(*size, sizes.vae_resize))
        tokens += rows * columns + MARKERS
    return tokens


def branches_of(plan: ImagePlan, parameters: ImageParameters) -> list[Segments]:
    """What is prefilled for a request."""
    return [plan.branch(name) for name in branch_names(parameters)]


def context_tokens(branches: Iterable[Segments]) -> int:
    """Tokens whose keys and values are kept for these branches; what they begin with in common is kept once."""
    prefixes = {branch[:end] for branch in branches for end in range(1, len(branch) + 1)}
    return sum(prefix[-1].length for prefix in prefixes)


def context_bytes(sizes: LlmSizes, branches: Iterable[Segments], element_bytes: int) -> int:
    """Bytes of keys and values that are kept for these branches while the image is made."""
    return context_tokens(branches) * kv_bytes_per_token(sizes, element_bytes)


def row_tokens(sizes: BagelSizes, parameters: ImageParameters, size: tuple[int, int]) -> int:
    """Tokens that a request adds to a step with guidance, for an image of that height and width in pixels."""
    return len(branch_names(parameters)) * image_tokens(sizes, *size)


def latent_bytes(sizes: BagelSizes, size: tuple[int, int]) -> int:
    """Bytes of the latent of an image of that height and width in pixels."""
    return (image_tokens(sizes, *size) - MARKERS) * sizes.token_channels * FLOAT32_BYTES
