"""The sizes from which a plan is made are those of the model."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vllm_omni_ext.cli.checkpoint import stored_tensors
from vllm_omni_ext.model_plugins.bagel.checkpoint import checkpoint_sizes
from vllm_omni_ext.model_plugins.bagel.memory import picture_tokens
from vllm_omni_ext.model_plugins.bagel.model import Bagel
from vllm_omni_ext.model_plugins.bagel.sizes import RELEASED, BagelSizes
from vllm_omni_ext.model_plugins.bagel.stages.facts import facts
from vllm_omni_ext.model_plugins.bagel.stages.stage_memory import (
    AUTOENCODER,
    config_sizes,
    memory,
    stored_elements,
    weight_elements,
)

OURS = {
    "llm.embed": "embeddings",
    "llm.head": "embeddings",
    "vision": "vision",
    "latents": "latents",
    "vae": "autoencoder",
}
"""Beginnings of our own parameters' names, and their part."""


def config() -> SimpleNamespace:
    """The release's config, without what the release leaves out."""
    llm, vit = RELEASED.llm, RELEASED.vit
    return SimpleNamespace(
        llm_config=SimpleNamespace(
            hidden_size=llm.hidden,
            intermediate_size=llm.feed_forward,
            num_hidden_layers=llm.layers,
            num_attention_heads=llm.heads,
            num_key_value_heads=llm.kv_heads,
            vocab_size=llm.vocabulary,
            rms_norm_eps=llm.epsilon,
            max_position_embeddings=32768,
        ),
        vit_config=SimpleNamespace(
            hidden_size=vit.hidden,
            intermediate_size=vit.feed_forward,
            num_hidden_layers=vit.layers,
            num_attention_heads=vit.heads,
            patch_size=vit.patch,
            layer_norm_eps=vit.epsilon,
        ),
        vit_max_num_patch_per_side=vit.side,
        latent_patch_size=2,
        vae_config={"z_channels": 16, "downsample": 8},
    )


def counted(sizes: BagelSizes) -> Counter[str]:
    """Elements of the model itself."""
    with torch.device("meta"):
        model = Bagel(sizes)
    found = Counter[str]()
    for name, parameter in model.named_parameters():
        part = next((part for start, part in OURS.items() if name.startswith(start)), "")
        found[part or ("picture experts" if ".gen." in name else "text experts")] += parameter.numel()
    return found


def test_the_releases_sizes() -> None:
    assert config_sizes(config()) == RELEASED
    assert weight_elements(RELEASED) == counted(RELEASED)


def test_a_checkpoints_sizes(checkpoint: Path) -> None:
    sizes = checkpoint_sizes(checkpoint)
    assert weight_elements(sizes) == counted(sizes)
    stored = stored_tensors(checkpoint)
    assert stored is not None
    assert stored_elements(stored) == counted(sizes)


def test_what_the_stages_hold() -> None:
    found = memory(config())
    sizes = {name: sum(part.elements for part in each.weights) for name, each in found.items()}
    real = counted(RELEASED)
    assert sizes["ar"] == real["text experts"] + real["embeddings"] + real["vision"]
    assert sizes["dit"] == sum(real.values()) - real[AUTOENCODER]
    assert sum(part.stored_bytes for part in found["dit"].weights) == 4 * real[AUTOENCODER]
    assert (found["ar"].kv_layers, found["ar"].kv_heads, found["ar"].kv_head_dim) == (28, 4, 128)
    assert found["dit"].kv_layers == 0


def test_the_largest_picture() -> None:
    encoder = memory(config())["ar"].encoder
    assert encoder is not None
    assert encoder.image_tokens == picture_tokens(RELEASED, 4000, 4000, latents=False) == 70 * 70 + 2


def test_facts() -> None:
    found = facts(config(), {})
    assert found.max_model_len == {"ar": 32768, "dit": 32768}
    assert found.kv_bytes_per_token == {"ar": 2 * 28 * 4 * 128 * 4}


@pytest.mark.engine
def test_they_do_without_vllm() -> None:
    package = "vllm_omni_ext.model_plugins.bagel.stages"
    code = f"import sys, {package}.facts, {package}.stage_memory\nprint('vllm' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
