"""The sizes from which a plan is made are those of the model."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support.bagel_runs import picture
from vllm_omni_ext.cli.checkpoint import stored_tensors
from vllm_omni_ext.model_plugins.bagel.checkpoint import checkpoint_sizes
from vllm_omni_ext.model_plugins.bagel.family import DIT
from vllm_omni_ext.model_plugins.bagel.memory import image_tokens, kv_bytes_per_token, picture_tokens
from vllm_omni_ext.model_plugins.bagel.model import Bagel
from vllm_omni_ext.model_plugins.bagel.prompts import Prompts
from vllm_omni_ext.model_plugins.bagel.sizes import RELEASED, BagelSizes
from vllm_omni_ext.model_plugins.bagel.stages import scheduler
from vllm_omni_ext.model_plugins.bagel.stages.facts import WEIGHTS, config_sizes, facts, model_tensors
from vllm_omni_ext.plugins.memory import measured
from vllm_omni_ext.topology.memory import need


def config() -> SimpleNamespace:
    """The release's config, without the fields that the release leaves out."""
    llm, vit = RELEASED.llm, RELEASED.vit
    llm_config = {
        "hidden_size": llm.hidden,
        "intermediate_size": llm.feed_forward,
        "num_hidden_layers": llm.layers,
        "num_attention_heads": llm.heads,
        "num_key_value_heads": llm.kv_heads,
        "vocab_size": llm.vocabulary,
        "rms_norm_eps": llm.epsilon,
        "max_position_embeddings": 32768,
    }
    vit_config = {
        "hidden_size": vit.hidden,
        "intermediate_size": vit.feed_forward,
        "num_hidden_layers": vit.layers,
        "num_attention_heads": vit.heads,
        "patch_size": vit.patch,
        "layer_norm_eps": vit.epsilon,
    }
    return SimpleNamespace(
        llm_config=SimpleNamespace(**llm_config),
        vit_config=SimpleNamespace(**vit_config),
        vit_max_num_patch_per_side=vit.side,
        latent_patch_size=2,
        vae_config={"z_channels": 16, "downsample": 8},
    )


def counted(sizes: BagelSizes) -> Counter[str]:
    """Elements of the model itself, by its parts; those of the language model by the kind of its experts."""
    with torch.device("meta"):
        model = Bagel(sizes)
    found = Counter[str]()
    for name, parameter in model.named_parameters():
        found[name.split(".")[0] + (".gen" if ".gen." in name else "")] += parameter.numel()
    return found


def test_sizes_of_the_release_and_of_a_checkpoint_are_those_of_the_model(checkpoint: Path) -> None:
    assert config_sizes(config()) == RELEASED
    stored = stored_tensors(checkpoint)
    assert stored is not None
    described = model_tensors(checkpoint_sizes(checkpoint))
    for parts in WEIGHTS.values():
        assert measured(parts, stored) == measured(parts, described)
    assert sum(count for _, count, _ in stored.values()) == counted(checkpoint_sizes(checkpoint)).total()


def test_each_stage_holds_its_weights() -> None:
    found = facts(config(), {})
    sizes = {name: sum(part.elements for part in each.weights) for name, each in found.items()}
    real, llm = counted(RELEASED), RELEASED.llm
    assert sizes["ar"] == real["llm"] + real["vision"]
    assert [part.elements for part in found["ar"].weights if part.quantizable] == [
        real["llm"] - 2 * llm.vocabulary * llm.hidden
    ]
    assert sizes["dit"] == real.total() - real["vae"]
    assert sum(part.stored_bytes for part in found["dit"].weights) == 4 * real["vae"]
    assert (found["ar"].kv_layers, found["ar"].kv_heads, found["ar"].kv_head_dim) == (28, 4, 128)
    assert found["dit"].kv_layers == 0


@pytest.mark.parametrize("size", [(58, 74), (300, 20), (1, 1), (96, 96)])
def test_tokens_of_a_picture_are_those_of_its_segments(size: tuple[int, int], model: Bagel, prompts: Prompts) -> None:
    edit, look = prompts.image([picture(*size, 1)]), prompts.reply([picture(*size, 1)])
    for latents, segments in ((True, edit.cond), (False, look)):
        expected = sum(each.length for each in segments)
        assert picture_tokens(model.sizes, *size, latents=latents) == expected


def test_tokens_of_the_released_model() -> None:
    assert kv_bytes_per_token(RELEASED.llm, 2) == 56 * 1024
    assert picture_tokens(RELEASED, 1024, 1024, latents=True) == 4098 + 4902
    assert image_tokens(RELEASED, 1024, 1024) == 4098


def test_the_largest_picture_and_facts_of_the_config() -> None:
    found = facts(config(), {})
    encoder = found["ar"].encoder
    assert encoder is not None
    assert encoder.image_tokens == picture_tokens(RELEASED, 4000, 4000, latents=False) == 70 * 70 + 2
    assert {name: each.max_model_len for name, each in found.items()} == {"ar": 32768, "dit": 32768}


@pytest.mark.slow
@pytest.mark.parametrize("gib", [80, 141])
@pytest.mark.parametrize("alone", [False, True])
def test_the_budget_of_a_device_has_the_planned_contexts(
    gib: int, alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where `dit` shares the device, and its part of the memory has nothing beyond its plan."""
    monkeypatch.setattr(scheduler, "current_platform", SimpleNamespace(get_device_total_memory=lambda: gib << 30))
    spec = DIT.engine_defaults | {"dtype": "bfloat16", "max_model_len": 32768}
    planned = need(facts(config(), {})["dit"], spec)
    utilization = 0.92 if alone else planned.fixed / (gib << 30)
    given = SimpleNamespace(
        device_config=SimpleNamespace(device_type="cuda"),
        cache_config=SimpleNamespace(gpu_memory_utilization=utilization),
        model_config=SimpleNamespace(dtype=torch.bfloat16),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=spec["max_num_batched_tokens"]),
    )
    assert 29e9 < scheduler.weight_bytes(RELEASED, torch.bfloat16) < 31e9
    budget = scheduler.context_budget(given, RELEASED)
    assert budget > planned.buffers * (5 if alone else 0.99) > 1.9 * 2**30
    given.cache_config.gpu_memory_utilization = 0.1
    assert scheduler.context_budget(given, RELEASED) == 0
