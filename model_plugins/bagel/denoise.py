"""Images in the making, and one step of any number of them in one forward pass.

    running = begin(model, plan, parameters, generator)    # prefill, first noise
    while not running.done:
        denoiser.step([running, ...])                       # whoever is running
    finished = finish(model, running)                       # the autoencoder

An image is dropped, at any time, by not stepping it again: nothing else refers to what it holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vllm_omni_ext.model_plugins.bagel import images
from vllm_omni_ext.model_plugins.bagel.context import Context
from vllm_omni_ext.model_plugins.bagel.guidance import branch_names, guide, guided_steps, schedule
from vllm_omni_ext.model_plugins.bagel.llm import Layout
from vllm_omni_ext.model_plugins.bagel.model import Bagel
from vllm_omni_ext.model_plugins.bagel.parameters import ImageParameters
from vllm_omni_ext.model_plugins.bagel.prefill import Prefill
from vllm_omni_ext.model_plugins.bagel.prompts import MARKERS, ImagePlan

Branches = dict[str, Context]
"""Contexts by the branch's name: "cond", and "text" and "img" with guidance."""


@dataclass(eq=False)
class RunningImage:
    """An image between its first noise and its last step.

    Attributes:
        parameters: of the request.
        branches: contexts; they do not change.
        size: height and width in pixels.
        rows, columns: of latent tokens.
        places: `[tokens]` int64, places of the latent tokens in the table of positions.
        latent: `[tokens, token_channels]` float32, what has become of the noise so far.
        times, steps: `schedule` of the request, on the CPU.
        guided: for each evaluation whether the branches beside "cond" are computed.
        index: evaluations done.
    """

    parameters: ImageParameters
    branches: Branches
    size: tuple[int, int]
    rows: int
    columns: int
    places: Tensor = field(repr=False)
    latent: Tensor = field(repr=False)
    times: Tensor = field(repr=False)
    steps: Tensor = field(repr=False)
    guided: list[bool] = field(repr=False)
    index: int = 0

    @property
    def done(self) -> bool:
        """Whether all evaluations were made."""
        return self.index == len(self.times)

    def active(self) -> Branches:
        """The branches that the next evaluation computes, "cond" first."""
        return self.branches if self.guided[self.index] else {"cond": self.branches["cond"]}


@dataclass(frozen=True)
class Evaluation:
    """What a step did to one image.

    Attributes:
        before: the latent that was evaluated, `[tokens, token_channels]` float32.
        time: of the evaluation, from 1 to 0.
        branches: velocity of each branch that was computed, the shape of `before`.
        velocity: what was made of them.
    """

    before: Tensor
    time: float
    branches: dict[str, Tensor]
    velocity: Tensor

    def preview(self) -> Tensor:
        """The latent that this step alone would end in, for a look at what is coming."""
        return self.before - self.time * self.velocity


@dataclass(frozen=True)
class FinishedImage:
    """An image.

    Attributes:
        image: `[height, width, 3]` uint8.
        pixels: `[3, height, width]` float32 as the autoencoder gave them, about -1 to 1.
        latent: `[tokens, token_channels]` float32.
    """

    image: Tensor
    pixels: Tensor
    latent: Tensor


def begin(
    model: Bagel,
    plan: ImagePlan,
    parameters: ImageParameters,
    *,
    generator: torch.Generator | None = None,
    prefill: Prefill | None = None,
) -> RunningImage:
    """Compute the contexts that guidance needs, and draw the first noise.

    Args:
        model: the model.
        plan: what the branches see; with the thought in it if the request thinks.
        parameters: of the request.
        generator: of the request, on the CPU; a new one with the request's seed if missing.
        prefill: contexts of the request that were computed before, with the same generator.

    Raises:
        ParameterError: the model cannot make an image of that size.
    """
    height, width = parameters.image_size(model.sizes, plan.size)
    generator = generator or seeded(parameters)
    prefill = prefill or Prefill(model, generator)
    times, steps = schedule(parameters)
    guided = guided_steps(parameters, times)
    branches = {name: prefill.context(plan.branch(name)) for name in branch_names(parameters)}
    rows, columns = height // model.sizes.token_pixels, width // model.sizes.token_pixels
    noise = torch.randn(rows * columns, model.sizes.token_channels, generator=generator)
    places = images.places(rows, columns, model.sizes.latent_side)
    return RunningImage(
        parameters=parameters,
        branches=branches,
        size=(height, width),
        rows=rows,
        columns=columns,
        places=places.to(model.device),
        latent=noise.to(model.device),
        times=times,
        steps=steps,
        guided=guided,
    )


def seeded(parameters: ImageParameters) -> torch.Generator:
    """A new generator of a request: on the CPU, so that a seed gives the same image on every device."""
    return torch.Generator("cpu").manual_seed(parameters.seed)


class Denoiser:
    """Steps images together. What is the same as in the step before is kept: where tokens belong, and the markers."""

    def __init__(self, model: Bagel) -> None:
        self._model = model
        self._key: tuple[tuple[int, int, int], ...] | None = None
        self._kept: tuple[Layout, Tensor] | None = None

    @torch.inference_mode()
    def step(self, running: Sequence[RunningImage]) -> list[Evaluation]:
        """One evaluation of each image, in one forward pass.

        Sizes, times, contexts and guidance may differ; each branch of an image is a row. An image that is done must
        not be among them.
        """
        active = [image.active() for image in running]
        velocities = iter(self._forward(running, active))
        out = []
        for image, branches in zip(running, active, strict=True):
            found = {name: next(velocities) for name in branches}
            velocity = found["cond"]
            if "text" in found:
                velocity = guide(image.parameters, velocity, found["text"], found.get("img"))
            out.append(Evaluation(image.latent, float(image.times[image.index]), found, velocity))
            image.latent = image.latent - velocity * image.steps[image.index].item()
            image.index += 1
        return out

    def _forward(self, running: Sequence[RunningImage], active: Sequence[Branches]) -> Sequence[Tensor]:
        """Velocity of each row, `[tokens, token_channels]` float32."""
        projections, llm = self._model.latents, self._model.llm
        tokens = [image.places.shape[0] for image in running]
        times = torch.stack([image.times[image.index] for image in running]).to(self._model.device)
        counts = torch.tensor(tokens, device=self._model.device)
        embedded = projections.embed(
            torch.cat([image.latent for image in running]),
            projections.times(times).repeat_interleave(counts, dim=0, output_size=sum(tokens)),
            torch.cat([image.places for image in running]),
        ).split(tokens)
        gen = [part for part, branches in zip(embedded, active, strict=True) for _ in branches]
        contexts = tuple(context for branches in active for context in branches.values())
        lengths = tuple(part.shape[0] for part in gen)
        layout, markers = self._places(contexts, lengths)
        out = llm(markers, torch.cat(gen), layout, contexts, hidden="gen", keep=False)
        return projections.leave(out.hidden).float().split(lengths)

    def _places(self, contexts: tuple[Context, ...], lengths: tuple[int, ...]) -> tuple[Layout, Tensor]:
        """Where the rows' tokens belong, and the embeddings of the rows' markers."""
        rows = zip(contexts, lengths, strict=True)
        key = tuple((context.length, context.position, length) for context, length in rows)
        if self._kept is None or key != self._key:
            blocks = [length + MARKERS for length in lengths]
            layout = self._model.llm.block_layout(contexts, blocks, latents=True)
            self._key, self._kept = key, (layout, self._model.markers().repeat(len(lengths), 1))
        return self._kept


@torch.inference_mode()
def finish(model: Bagel, running: RunningImage) -> FinishedImage:
    """Decode an image that is done. The autoencoder takes one image at a time, in float32."""
    return decode(model, running.latent, running.rows)


@torch.inference_mode()
def decode(model: Bagel, latent: Tensor, rows: int) -> FinishedImage:
    """Decode a latent `[tokens, token_channels]` of so many rows of tokens; also a preview's."""
    grid = images.to_latents(latent, rows, model.sizes.latent_patch)
    pixels = model.vae.decode(grid[None])[0]
    return FinishedImage(images.to_bytes(pixels), pixels, latent)
