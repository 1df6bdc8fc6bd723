"""Context lengths, and memory on a CUDA device, of the stages of a BAGEL checkpoint, for the planner.

This module imports no vLLM.

Activations are the tensors that are alive at the same time in the largest layer, counted by hand and not measured on a
GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, replace
from typing import Any

from vllm_omni_ext.model_plugins.bagel.memory import (
    autoencoder_elements,
    kv_bytes_per_token,
    picture_tokens,
    step_elements,
)
from vllm_omni_ext.model_plugins.bagel.sizes import RELEASED, BagelSizes, LlmSizes, ResizeRule
from vllm_omni_ext.plugins.memory import EncoderMemory, StageFacts, StoredTensors, WeightPart, measured

AUTOENCODER = r"(encoder|decoder)\."

WEIGHTS = {
    "ar": (
        WeightPart(names=r"(vit_model|vit_pos_embed|connector|language_model\.(model\.embed_tokens|lm_head))\."),
        WeightPart(names=r"language_model\.(?!.*_moe_gen)", quantizable=True),
    ),
    "dit": (
        WeightPart(names=AUTOENCODER, split=False, float32=True),
        WeightPart(names="", split=False),
    ),
}
"""Tensors of each stage by name: `ar` has the weights for text and the ViT, `dit` has all weights."""

PROMPT_TOKENS = 512
"""Number of text tokens that is added to the largest picture's tokens in the estimate of a request's context."""


def facts(
    hf_config: Any, params: Mapping[str, Mapping[str, Any]], stored: StoredTensors | None = None
) -> dict[str, StageFacts]:
    """Return by stage the sizes from which the planner computes memory: weights, context length, activations, KV cache.

    Args:
        hf_config: the Hugging Face config of the whole model.
        params: default parameters by stage; no fact depends on them.
        stored: all tensors of the checkpoint; None: its files are not on this machine, and the weights are computed
            from the config.

    The context length of `dit` is also the limit of tokens in a denoise step, unless the user sets another limit.
    """
    sizes = config_sizes(hf_config)
    tensors = model_tensors(sizes) if stored is None else stored
    weights = {stage: measured(parts, tensors) for stage, parts in WEIGHTS.items()}
    llm, longest = sizes.llm, sizes.vae_resize.longest
    whole_step, split_step = step_elements(llm)
    context = picture_tokens(sizes, longest, longest, latents=True) + PROMPT_TOKENS
    length = hf_config.llm_config.max_position_embeddings
    return {
        "ar": StageFacts(
            max_model_len=length,
            weights=weights["ar"],
            kv_layers=llm.layers,
            kv_heads=llm.kv_heads,
            kv_head_dim=llm.head_dim,
            step_elements=whole_step,
            split_step_elements=split_step,
            vocabulary=llm.vocabulary,
            graph_layers=llm.layers,
            encoder=_encoder(sizes),
        ),
        "dit": StageFacts(
            max_model_len=length,
            weights=weights["dit"],
            step_elements=whole_step + split_step,
            pass_elements=autoencoder_elements(sizes),
            sequence_elements=context * kv_bytes_per_token(llm, 1),
        ),
    }


def config_sizes(hf_config: Any) -> BagelSizes:
    """Return the sizes of a checkpoint from its config; sizes that are not in the config are those of the release.

    The result may differ from the sizes of the weights: the released config counts one ViT layer too many.
    """
    llm, vit, vae = hf_config.llm_config, hf_config.vit_config, getattr(hf_config, "vae_config", None) or {}
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
        vit=replace(
            RELEASED.vit,
            hidden=vit.hidden_size,
            feed_forward=vit.intermediate_size,
            layers=vit.num_hidden_layers,
            heads=vit.num_attention_heads,
            patch=vit.patch_size,
            side=hf_config.vit_max_num_patch_per_side,
            epsilon=vit.layer_norm_eps,
        ),
        vae=RELEASED.vae
        if "ch" not in vae
        else replace(
            RELEASED.vae,
            width=vae["ch"],
            widths=tuple(vae["ch"] * factor for factor in vae["ch_mult"]),
            blocks=vae["num_res_blocks"],
            channels=vae["z_channels"],
        ),
        latent_patch=hf_config.latent_patch_size,
        vae_resize=ResizeRule(*(getattr(hf_config, "vae_transform", None) or astuple(RELEASED.vae_resize))),
        vit_resize=ResizeRule(*(getattr(hf_config, "vit_transform", None) or astuple(RELEASED.vit_resize))),
    )


def model_tensors(sizes: BagelSizes) -> StoredTensors:
    """Return the tensors (name -> dtype, elements, bytes) of a model of these sizes, in 16 bits.

    Tensors that the model concatenates count as one tensor.
    """
    import torch

    from vllm_omni_ext.model_plugins.bagel.checkpoint import model_sources
    from vllm_omni_ext.model_plugins.bagel.model import Bagel

    with torch.device("meta"):
        model = Bagel(sizes)
    sources, found = model_sources(sizes), {}
    for name, parameter in model.named_parameters():
        [first, *_] = sources.get(name, (name.removeprefix("vae."),))
        found[first] = ("BF16", parameter.numel(), 2 * parameter.numel())
    return found


def _encoder(sizes: BagelSizes) -> EncoderMemory:
    """Return the memory of the ViT's activations for one patch.

    Every device stores in full: the patch's pixels, once in float32 and once in 16 bits, its hidden state, its
    residual and its normalized hidden state. Tensor parallelism divides queries, keys and values, attention's output,
    and the inner activations of the MLP.
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
