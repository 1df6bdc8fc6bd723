"""Results of the reference implementation with the tiny checkpoint, and comparisons."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors import safe_open
from torch import Tensor

from vllm_omni_ext.model_plugins.bagel.denoise import Denoiser, Evaluation, RunningImage
from vllm_omni_ext.model_plugins.bagel.model import Bagel
from vllm_omni_ext.model_plugins.bagel.parameters import ImageParameters, image_parameters
from vllm_omni_ext.model_plugins.bagel.prompts import Part

GOLDEN = Path(__file__).parents[1] / "data" / "bagel"


@dataclass(frozen=True)
class Golden:
    """One run of the reference: tensors by name, and its request."""

    tensors: dict[str, Tensor]
    info: dict[str, Any]

    @property
    def parts(self) -> list[Part]:
        """The prompt."""
        source = self.tensors.get("source_u8")
        return [Image.fromarray(source.numpy()) if term == "source_u8" else term for term in self.info["terms"]]

    @property
    def parameters(self) -> ImageParameters:
        """Of an image run."""
        given = dict(self.info["kwargs"])
        given["height"], given["width"] = given.pop("image_shapes")
        return image_parameters({**given, "seed": self.info["seed"]}, edit=self.info["case"] == "edit")


def golden(name: str) -> Golden:
    """A run by its name, e.g. "t2i_fp32"."""
    with safe_open(GOLDEN / f"{name}.safetensors", framework="pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
        return Golden(tensors, json.loads(file.metadata()["info"]))


def picture(height: int, width: int, seed: int) -> Image.Image:
    """Noise."""
    pixels = np.random.RandomState(seed).randint(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def run(model: Bagel, running: RunningImage) -> list[Evaluation]:
    """All steps of one image by itself."""
    denoiser, found = Denoiser(model), []
    while not running.done:
        found += denoiser.step([running])
    return found


def stacked(evaluations: Sequence[Evaluation], branch: str) -> Tensor:
    """Velocities of one branch, of the evaluations that had it."""
    return torch.stack([each.branches[branch] for each in evaluations if branch in each.branches])


def difference(one: Tensor, other: Tensor) -> float:
    """Largest difference of two tensors of the same shape."""
    assert one.shape == other.shape
    return (one.float() - other.float()).abs().max().item()
