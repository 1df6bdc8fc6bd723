"""The released shape, on the device without memory: shapes fit together, and nothing is left on the CPU by mistake."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.model_plugins.bagel.runs import picture
from vllm_omni_ext.model_plugins.bagel.denoise import Denoiser, begin, finish
from vllm_omni_ext.model_plugins.bagel.model import Bagel
from vllm_omni_ext.model_plugins.bagel.parameters import image_parameters
from vllm_omni_ext.model_plugins.bagel.prompts import Prompts
from vllm_omni_ext.model_plugins.bagel.sizes import RELEASED
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


def test_the_benchmark_measures_the_released_shape(benchmark: Callable[[str], ModuleType]) -> None:
    assert benchmark("bagel_steps").RELEASED is RELEASED
