"""Reads the sizes of a checkpoint from the shapes of its weights where possible: some released configs are outdated.

Only sizes that do not follow from shapes are read from the configs: the number of ViT heads, epsilons, RoPE's base, the
autoencoder's scale and shift, and the limits of pictures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Shapes = Mapping[str, tuple[int, ...]]

LLM = "language_model.model"
VIT = "vit_model.vision_model"
RELEASED_SCALE, RELEASED_SHIFT = 0.3611, 0.1159
"""Scale and shift of the released autoencoder, whose files do not contain them."""


class CheckpointError(Exception):
    """A checkpoint is no BAGEL checkpoint, or is damaged or not supported; the message contains the reason."""


@dataclass(frozen=True, slots=True)
class LlmSizes:
    """Sizes of the language model; both expert sets have the same sizes."""

    hidden: int
    feed_forward: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    rope_theta: float
    epsilon: float


@dataclass(frozen=True, slots=True)
class VitSizes:
    """Sizes of the ViT. `side` is the number of rows and of columns of its table of positions, `patch` is in pixels."""

    hidden: int
    feed_forward: int
    layers: int
    heads: int
    patch: int
    side: int
    epsilon: float


@dataclass(frozen=True, slots=True)
class VaeSizes:
    """Sizes of the autoencoder.

    Attributes:
        width: channels after the encoder's first convolution.
        widths: channels of each level, the highest resolution first.
        blocks: residual blocks of an encoder level; a decoder level has one more.
        channels: channels of a latent.
        scale, shift: a latent is `(sample - shift) * scale`.
    """

    width: int
    widths: tuple[int, ...]
    blocks: int
    channels: int
    scale: float
    shift: float

    @property
    def downsample(self) -> int:
        """Pixels per latent along a side."""
        return 2 ** (len(self.widths) - 1)


@dataclass(frozen=True, slots=True)
class ResizeRule:
    """Rule by which pictures are resized: limits of the longest and the shortest side in pixels; sides are multiples of
    `stride`."""

    longest: int
    shortest: int
    stride: int


@dataclass(frozen=True, slots=True)
class BagelSizes:
    """All sizes of a checkpoint.

    Attributes:
        latent_side: number of rows and of columns of the table of latent positions, in latent tokens.
        latent_patch: latents per side of one latent token.
        vae_resize: rule for every input picture.
        vit_resize: rule for the ViT's input, which is a picture after `vae_resize`.
    """

    llm: LlmSizes
    vit: VitSizes
    vae: VaeSizes
    latent_side: int
    latent_patch: int
    vae_resize: ResizeRule
    vit_resize: ResizeRule

    @property
    def token_pixels(self) -> int:
        """Pixels per latent token along a side."""
        return self.vae.downsample * self.latent_patch

    @property
    def token_channels(self) -> int:
        """Number of elements of one latent token."""
        return self.latent_patch**2 * self.vae.channels

    @property
    def largest_side(self) -> int:
        """Largest height and width of an image in pixels."""
        return self.latent_side * self.token_pixels


RELEASED = BagelSizes(
    llm=LlmSizes(
        hidden=3584,
        feed_forward=18944,
        layers=28,
        heads=28,
        kv_heads=4,
        head_dim=128,
        vocabulary=152064,
        rope_theta=1e6,
        epsilon=1e-6,
    ),
    vit=VitSizes(hidden=1152, feed_forward=4304, layers=26, heads=16, patch=14, side=70, epsilon=1e-6),
    vae=VaeSizes(
        width=128,
        widths=(128, 256, 512, 512),
        blocks=2,
        channels=16,
        scale=RELEASED_SCALE,
        shift=RELEASED_SHIFT,
    ),
    latent_side=64,
    latent_patch=2,
    vae_resize=ResizeRule(1024, 512, 16),
    vit_resize=ResizeRule(980, 224, 14),
)
"""Sizes of the published BAGEL-7B-MoT, for measurements and plans without its files."""


def read_sizes(
    ema: Shapes, ae: Shapes, config: Mapping[str, Any], llm: Mapping[str, Any], vit: Mapping[str, Any]
) -> BagelSizes:
    """Return the sizes of a checkpoint from the shapes of its tensors and from its configs.

    Args:
        ema, ae: shapes by tensor name in `ema.safetensors` and `ae.safetensors`.
        config, llm, vit: contents of `config.json` (may be empty), `llm_config.json` and `vit_config.json`.

    Raises:
        CheckpointError: a tensor from which sizes are read is missing, or has an invalid shape.
    """
    try:
        llm_sizes, vit_sizes, vae_sizes = _llm(ema, llm), _vit(ema, vit), _vae(ae, config.get("vae_config") or {})
        latent_channels = ema["vae2llm.weight"][1]
        table = ema["latent_pos_embed.pos_embed"][0]
    except KeyError as error:
        raise CheckpointError(f"there is no tensor or config entry {error}; is this a BAGEL checkpoint?") from None
    latent_side = _root(table, "latent_pos_embed.pos_embed")
    latent_patch = _root(latent_channels // vae_sizes.channels, "vae2llm.weight")
    pixels = vae_sizes.downsample * latent_patch
    released = ResizeRule(1024, 512, pixels), ResizeRule(980, 224, vit_sizes.patch)
    return BagelSizes(
        llm=llm_sizes,
        vit=vit_sizes,
        vae=vae_sizes,
        latent_side=latent_side,
        latent_patch=latent_patch,
        vae_resize=_rule(config.get("vae_transform"), released[0], latent_side * pixels),
        vit_resize=_rule(config.get("vit_transform"), released[1], vit_sizes.side * vit_sizes.patch),
    )


def _llm(shapes: Shapes, config: Mapping[str, Any]) -> LlmSizes:
    first = f"{LLM}.layers.0"
    head_dim = shapes[f"{first}.self_attn.q_norm.weight"][0]
    vocabulary, hidden = shapes[f"{LLM}.embed_tokens.weight"]
    return LlmSizes(
        hidden=hidden,
        feed_forward=shapes[f"{first}.mlp.gate_proj.weight"][0],
        layers=_count(shapes, f"{LLM}.layers."),
        heads=shapes[f"{first}.self_attn.q_proj.weight"][0] // head_dim,
        kv_heads=shapes[f"{first}.self_attn.k_proj.weight"][0] // head_dim,
        head_dim=head_dim,
        vocabulary=vocabulary,
        rope_theta=float(config.get("rope_theta", 1e6)),
        epsilon=float(config.get("rms_norm_eps", 1e-6)),
    )


def _vit(shapes: Shapes, config: Mapping[str, Any]) -> VitSizes:
    hidden, values = shapes[f"{VIT}.embeddings.patch_embedding.weight"]
    positions = f"{VIT}.embeddings.position_embedding.weight"
    side = _root(shapes[positions][0], positions)
    if shapes["vit_pos_embed.pos_embed"][0] != side**2:
        raise CheckpointError("vit_pos_embed.pos_embed and the ViT's own table of positions have different sides")
    return VitSizes(
        hidden=hidden,
        feed_forward=shapes[f"{VIT}.encoder.layers.0.mlp.fc1.weight"][0],
        layers=_count(shapes, f"{VIT}.encoder.layers."),
        heads=int(config["num_attention_heads"]),
        patch=_root(values // 3, f"{VIT}.embeddings.patch_embedding.weight"),
        side=side,
        epsilon=float(config.get("layer_norm_eps", 1e-6)),
    )


def _vae(shapes: Shapes, config: Mapping[str, Any]) -> VaeSizes:
    levels = _count(shapes, "encoder.down.")
    blocks = _count(shapes, "encoder.down.0.block.")
    return VaeSizes(
        width=shapes["encoder.conv_in.weight"][0],
        widths=tuple(shapes[f"encoder.down.{level}.block.0.conv1.weight"][0] for level in range(levels)),
        blocks=blocks,
        channels=shapes["decoder.conv_in.weight"][1],
        scale=float(config.get("scale_factor", RELEASED_SCALE)),
        shift=float(config.get("shift_factor", RELEASED_SHIFT)),
    )


def _rule(written: Any, released: ResizeRule, largest: int) -> ResizeRule:
    """Return a resize rule with sides of at most `largest` pixels.

    Args:
        written: the rule in the checkpoint's config, [longest, shortest, stride]; None: `released` applies.
        released: the rule of the released checkpoint.
        largest: limit of the sides in pixels.
    """
    try:
        rule = released if written is None else ResizeRule(*(int(number) for number in written))
    except (TypeError, ValueError):
        raise CheckpointError(f"config.json: {written!r} is no resize; write [largest, smallest, step]") from None
    return ResizeRule(min(rule.longest, largest), min(rule.shortest, largest), rule.stride)


def _count(shapes: Shapes, prefix: str) -> int:
    """Return the number of layers: how many different numbers, from 0 on, follow the prefix in tensor names."""
    found = {name.removeprefix(prefix).split(".", 1)[0] for name in shapes if name.startswith(prefix)}
    numbers = {int(text) for text in found if text.isdigit()}
    if not numbers or numbers != set(range(len(numbers))):
        raise CheckpointError(f"{prefix}*: layers {sorted(numbers)}, not 0, 1, 2 and so on")
    return len(numbers)


def _root(number: int, name: str) -> int:
    side = math.isqrt(number)
    if side == 0 or side**2 != number:
        raise CheckpointError(f"{name}: {number} entries are no square")
    return side
