"""Memory of the stages of a BAGEL checkpoint on a CUDA device. Reads plain attributes, without vLLM.

The sizes of the weights are computed from the config, or summed from the headers of the checkpoint's files if those can
be read. Activations are the tensors that are alive at the same time in the largest layer, counted by hand and not
measured on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vllm_omni_ext.model_plugins.bagel.memory import FLOAT32_BYTES, picture_tokens
from vllm_omni_ext.model_plugins.bagel.sizes import RELEASED, BagelSizes, LlmSizes, ResizeRule, VaeSizes, VitSizes
from vllm_omni_ext.plugins.memory import EncoderMemory, StageMemory, StoredTensors, WeightPart

UND, GEN, EMBEDDINGS, VISION, LATENTS, AUTOENCODER = (
    "text experts",
    "picture experts",
    "embeddings",
    "vision",
    "latents",
    "autoencoder",
)
"""Names of the weight parts."""

TIME_CHANNELS = 256
"""Inputs of the time embedder."""

VAE_TENSORS = 4
"""Tensors of the size of the decoder's largest activation that are alive at the same time."""

PROMPT_TOKENS = 512
"""Tokens of texts, added to the largest picture in the estimate of a request's context."""

_PARTS_OF_NAMES = {
    "vit_model.": VISION,
    "vit_pos_embed.": VISION,
    "connector.": VISION,
    "vae2llm.": LATENTS,
    "llm2vae.": LATENTS,
    "time_embedder.": LATENTS,
    "latent_pos_embed.": LATENTS,
    "encoder.": AUTOENCODER,
    "decoder.": AUTOENCODER,
    "language_model.model.embed_tokens.": EMBEDDINGS,
    "language_model.lm_head.": EMBEDDINGS,
}


def memory(hf_config: Any, stored: StoredTensors | None = None) -> dict[str, StageMemory]:
    """Return the memory of a replica of each stage.

    Args:
        hf_config: the Hugging Face config of the whole model.
        stored: all tensors of the checkpoint, if its files could be read; None: sizes come from the config.
    """
    sizes = config_sizes(hf_config)
    elements = weight_elements(sizes) if stored is None else stored_elements(stored)
    return {"ar": _ar(sizes, elements), "dit": _dit(sizes, elements)}


def config_sizes(hf_config: Any) -> BagelSizes:
    """Return the sizes as a config has them, and those of the release where it has none.

    They may differ from the weights' sizes, which only their files show: the release counts one ViT layer too many.
    """
    llm, vit = hf_config.llm_config, hf_config.vit_config
    side = hf_config.vit_max_num_patch_per_side
    vae = _vae(getattr(hf_config, "vae_config", None) or {})
    return replace(
        RELEASED,
        llm=LlmSizes(
            hidden=llm.hidden_size,
            feed_forward=llm.intermediate_size,
            layers=llm.num_hidden_layers,
            heads=llm.num_attention_heads,
            kv_heads=llm.num_key_value_heads,
            head_dim=llm.hidden_size // llm.num_attention_heads,
            vocabulary=llm.vocab_size,
            rope_theta=RELEASED.llm.rope_theta,
            epsilon=llm.rms_norm_eps,
        ),
        vit=VitSizes(
            hidden=vit.hidden_size,
            feed_forward=vit.intermediate_size,
            layers=vit.num_hidden_layers,
            heads=vit.num_attention_heads,
            patch=vit.patch_size,
            side=side,
            epsilon=vit.layer_norm_eps,
        ),
        vae=vae,
        latent_patch=hf_config.latent_patch_size,
        vae_resize=_rule(getattr(hf_config, "vae_transform", None), RELEASED.vae_resize),
        vit_resize=_rule(getattr(hf_config, "vit_transform", None), RELEASED.vit_resize),
    )


def _rule(written: Any, released: ResizeRule) -> ResizeRule:
    return ResizeRule(*written) if written else released


def _vae(config: Mapping[str, Any]) -> VaeSizes:
    if "ch" not in config:
        return RELEASED.vae
    return replace(
        RELEASED.vae,
        width=config["ch"],
        widths=tuple(config["ch"] * factor for factor in config["ch_mult"]),
        blocks=config["num_res_blocks"],
        channels=config["z_channels"],
    )


def part_of(tensor: str) -> str:
    """Return the weight part to which a tensor of the checkpoint belongs; "" if no stage loads it."""
    for beginning, part in _PARTS_OF_NAMES.items():
        if tensor.startswith(beginning):
            return part
    if not tensor.startswith("language_model."):
        return ""
    return GEN if "_moe_gen" in tensor else UND


def stored_elements(stored: StoredTensors) -> dict[str, int]:
    """Return the elements of each part in a checkpoint's files."""
    found = dict.fromkeys((UND, GEN, EMBEDDINGS, VISION, LATENTS, AUTOENCODER), 0)
    for name, (_, elements, _) in stored.items():
        if part := part_of(name):
            found[part] += elements
    return found


def weight_elements(sizes: BagelSizes) -> dict[str, int]:
    """Return the elements of each part, computed."""
    llm = sizes.llm
    experts = _experts(llm)
    hidden, token = llm.hidden, sizes.token_channels
    return {
        UND: experts,
        GEN: experts,
        EMBEDDINGS: 2 * llm.vocabulary * hidden,
        VISION: _vision(sizes.vit, hidden),
        LATENTS: _linear(token, hidden)
        + _linear(hidden, token)
        + _linear(TIME_CHANNELS, hidden)
        + _linear(hidden, hidden)
        + sizes.latent_side**2 * hidden,
        AUTOENCODER: _encoder(sizes.vae) + _decoder(sizes.vae),
    }


def _ar(sizes: BagelSizes, elements: Mapping[str, int]) -> StageMemory:
    llm = sizes.llm
    return StageMemory(
        weights=(
            WeightPart(name=UND, elements=elements[UND], quantizable=True),
            WeightPart(name=EMBEDDINGS, elements=elements[EMBEDDINGS]),
            WeightPart(name=VISION, elements=elements[VISION]),
        ),
        kv_layers=llm.layers,
        kv_heads=llm.kv_heads,
        kv_head_dim=llm.head_dim,
        step_elements=_STEP_HIDDEN * llm.hidden,
        split_step_elements=_split_step(llm),
        vocabulary=llm.vocabulary,
        graph_layers=llm.layers,
        encoder=_pictures(sizes),
    )


def _dit(sizes: BagelSizes, elements: Mapping[str, int]) -> StageMemory:
    llm, vae = sizes.llm, sizes.vae
    longest = sizes.vae_resize.longest
    context = picture_tokens(sizes, longest, longest, latents=True) + PROMPT_TOKENS
    in_model_dtype = (UND, GEN, EMBEDDINGS, VISION, LATENTS)
    return StageMemory(
        weights=(
            *(WeightPart(name=name, elements=elements[name], split=False) for name in in_model_dtype),
            WeightPart(name=AUTOENCODER, elements=0, stored_bytes=elements[AUTOENCODER] * FLOAT32_BYTES, split=False),
        ),
        step_elements=_STEP_HIDDEN * llm.hidden + _split_step(llm),
        # The autoencoder is float32: two elements of 16 bits for each of its own.
        pass_elements=2 * VAE_TENSORS * longest**2 * max(vae.widths[:2]),
        sequence_elements=context * 2 * llm.layers * llm.kv_heads * llm.head_dim,
    )


_STEP_HIDDEN = 6
"""Tensors `[tokens, hidden]`: hidden state, residual, their normed copies, the step's embeddings, attended values."""


def _split_step(llm: LlmSizes) -> int:
    """Return the elements of queries, keys and values, twice for RoPE, and of the MLP, for one token."""
    return 2 * (llm.heads + 2 * llm.kv_heads) * llm.head_dim + 3 * llm.feed_forward


def _pictures(sizes: BagelSizes) -> EncoderMemory:
    """Return the activations of the ViT for one patch.

    Every device holds its pixels in float32 and in 16 bits, hidden state, residual and normed copies; tensor
    parallelism divides queries, keys and values, attention's output, and the inner activations of the MLP.
    """
    vit, longest = sizes.vit, sizes.vae_resize.longest
    pixels = 3 * vit.patch**2
    return EncoderMemory(
        image_tokens=picture_tokens(sizes, longest, longest, latents=False),
        most_images=1,
        token_bytes=6 * pixels + 2 * (4 * vit.hidden + 2 * sizes.llm.hidden),
        split_token_bytes=2 * (4 * vit.hidden + 2 * vit.feed_forward),
        output_elements=sizes.llm.hidden,
    )


def _experts(llm: LlmSizes) -> int:
    """Return one set of experts, with its final norm."""
    query, pair = llm.heads * llm.head_dim, 2 * llm.kv_heads * llm.head_dim
    attention = _linear(llm.hidden, query + pair) + query * llm.hidden + 2 * llm.head_dim
    return llm.layers * (attention + 3 * llm.hidden * llm.feed_forward + 2 * llm.hidden) + llm.hidden


def _vision(vit: VitSizes, hidden: int) -> int:
    """Return ViT, connector and both tables of positions."""
    norm = 2 * vit.hidden
    layer = 4 * _linear(vit.hidden, vit.hidden) + 2 * norm
    layer += _linear(vit.hidden, vit.feed_forward) + _linear(vit.feed_forward, vit.hidden)
    patches = _linear(3 * vit.patch**2, vit.hidden)
    connector = _linear(vit.hidden, hidden) + _linear(hidden, hidden)
    return vit.layers * layer + patches + norm + connector + vit.side**2 * (vit.hidden + hidden)


def _linear(inputs: int, outputs: int) -> int:
    """Return the number of weights and biases."""
    return outputs * (inputs + 1)


def _conv(inputs: int, outputs: int) -> int:
    """Return the weights and biases of a convolution of 3 x 3."""
    return _linear(9 * inputs, outputs)


def _residual(inputs: int, outputs: int) -> int:
    shortcut = _linear(inputs, outputs) if inputs != outputs else 0
    return 2 * inputs + _conv(inputs, outputs) + 2 * outputs + _conv(outputs, outputs) + shortcut


def _middle(channels: int) -> int:
    return 2 * _residual(channels, channels) + 2 * channels + 4 * _linear(channels, channels)


def _encoder(vae: VaeSizes) -> int:
    last = vae.widths[-1]
    total, channels = _conv(3, vae.width), vae.width
    for width in vae.widths:
        total += _residual(channels, width) + (vae.blocks - 1) * _residual(width, width)
        channels = width
    total += sum(_conv(width, width) for width in vae.widths[:-1])
    return total + _middle(last) + 2 * last + _conv(last, 2 * vae.channels)


def _decoder(vae: VaeSizes) -> int:
    last, first = vae.widths[-1], vae.widths[0]
    total, channels = _conv(vae.channels, last) + _middle(last), last
    for width in reversed(vae.widths):
        total += _residual(channels, width) + vae.blocks * _residual(width, width)
        channels = width
    total += sum(_conv(width, width) for width in vae.widths[1:])
    return total + 2 * first + _conv(first, 3)
