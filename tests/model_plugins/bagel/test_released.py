"""The released shape, on the device without memory: shapes fit together, and nothing is left on the CPU by mistake."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file
from vllm.config import LoadConfig
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

from tests.support.bagel_runs import picture
from tests.support.dit_room import config_of
from vllm_omni_ext.model_plugins.bagel.checkpoint import checkpoint_sizes, empty_bagel, load_bagel
from vllm_omni_ext.model_plugins.bagel.denoise import Denoiser, begin, finish
from vllm_omni_ext.model_plugins.bagel.model import Bagel
from vllm_omni_ext.model_plugins.bagel.parameters import image_parameters
from vllm_omni_ext.model_plugins.bagel.prompts import Prompts
from vllm_omni_ext.model_plugins.bagel.sizes import RELEASED
from vllm_omni_ext.model_plugins.bagel.stages.dit import BagelDit
from vllm_omni_ext.model_plugins.bagel.tiny.bagel import write_bagel
from vllm_omni_ext.model_plugins.bagel.tiny.sparse import write_zeros
from vllm_omni_ext.model_plugins.bagel.tokens import Tokens


@pytest.fixture(scope="module")
def released(checkpoint: Path) -> Bagel:
    with torch.device("meta"):
        model = Bagel(RELEASED).requires_grad_(False)
    for part in (model.llm, model.vision, model.latents):
        part.to(torch.bfloat16)
    model.tokens = Tokens.from_directory(checkpoint)
    return model


def test_parameters(released: Bagel) -> None:
    def count(module: torch.nn.Module) -> float:
        return round(sum(p.numel() for p in module.parameters()) / 1e9, 2)

    assert (count(released.llm), count(released.vae)) == (14.14, 0.08)
    assert count(released.vision) == pytest.approx(0.43, abs=0.02)


def test_an_edit_and_an_image_together(released: Bagel) -> None:
    prompts = Prompts(released.tokens, RELEASED)
    plans = [prompts.image([picture(700, 1100, 1), "blue"]), prompts.image(["a red cat"])]
    given = [{"num_timesteps": 3}, {"num_timesteps": 3, "height": 512, "width": 768}]
    running = [
        begin(released, plan, image_parameters(each, edit=plan.size is not None))
        for plan, each in zip(plans, given, strict=True)
    ]
    assert {key.dtype for key, _ in running[0].branches["cond"].layers} == {torch.bfloat16}
    denoiser = Denoiser(released)
    while not running[0].done:
        denoiser.step(running)
    images = [finish(released, each) for each in running]
    assert [tuple(image.image.shape) for image in images] == [(656, 1024, 3), (512, 768, 3)]
    assert {image.latent.device.type for image in images} == {"meta"}
    assert {image.latent.dtype for image in images} == {torch.float32}


def test_the_benchmark_measures_the_released_shape(benchmark: Callable[[str], ModuleType], tmp_path: Path) -> None:
    args = argparse.Namespace(model=None, wide=False, released_shape=True)
    assert checkpoint_sizes(benchmark("bagel_steps").directory_of(args, str(tmp_path))) == RELEASED


def test_files_of_the_released_shape(tmp_path: Path) -> None:
    directory = write_bagel(tmp_path / "model", released_shape=True)
    sizes = checkpoint_sizes(directory)
    assert (sizes.llm, sizes.vit, sizes.vae) == (RELEASED.llm, RELEASED.vit, RELEASED.vae)
    assert sizes == RELEASED
    model = empty_bagel(directory, dtype=torch.bfloat16, device="meta")
    assert {part.dtype for part in model.llm.parameters()} == {torch.bfloat16}
    assert {part.dtype for part in model.vae.parameters()} == {torch.float32}
    files = [directory / name for name in ("ema.safetensors", "ae.safetensors")]
    assert sum(file.stat().st_size for file in files) == pytest.approx(
        sum(part.nbytes for part in model.parameters()), rel=1e-4
    )
    assert sum(file.stat().st_blocks for file in files) * 512 < 1 << 20, "zeros must not be written"


def test_zeros_are_read_as_zeros(tmp_path: Path) -> None:
    shapes = {"a": torch.empty(3, 5, dtype=torch.bfloat16, device="meta"), "b": torch.ones(7)}
    write_zeros(tmp_path / "zeros.safetensors", shapes)
    read = load_file(tmp_path / "zeros.safetensors")
    assert {name: (part.shape, part.dtype) for name, part in read.items()} == {
        name: (part.shape, part.dtype) for name, part in shapes.items()
    }
    assert not any(part.any() for part in read.values())


def test_weights_that_vllm_makes_up(checkpoint: Path) -> None:
    """With `load_format: dummy` vLLM calls no `load_weights`: it fills the parameters that are there."""
    config = config_of(checkpoint)
    config.load_config.load_format = "dummy"
    stage = BagelDit(vllm_config=config)
    expected = dict(load_bagel(checkpoint).named_parameters())
    assert {name: part.shape for name, part in stage.bagel.named_parameters()} == {
        name: part.shape for name, part in expected.items()
    }
    DummyModelLoader(LoadConfig(load_format="dummy")).load_weights(stage, config.model_config)
    for part in stage.parameters():
        assert part.isfinite().all() and part.any()
