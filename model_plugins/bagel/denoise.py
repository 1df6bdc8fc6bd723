"""Generates images: each denoise step computes any number of running images in one forward pass.

    running = begin(model, plan, parameters, generator)    # prefill, first noise
    while not running.done:
        denoiser.step([running, ...])                       # all running images
    finished = finish(model, running)                       # the autoencoder

An image that is not passed to `step` any more is freed: no other object refers to its memory.
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
"""Context of each guidance branch (see `prompts.ImagePlan`) by its name: "cond", and "text" and "img" with guidance."""


@dataclass(eq=False)
class RunningImage:
    """An image that is being generated: its state between the first noise and the last denoise step.

    Attributes:
        parameters: parameters of the request.
        branches: contexts of the branches; they do not change.
        size: height and width in pixels.
        rows, columns: number of rows and columns of latent tokens.
        places: `[tokens]` int64, indices of the latent tokens in the table of latent positions.
        latent: `[tokens, token_channels]` float32, the current latent.
        times, steps: time and step length of each evaluation (`guidance.schedule`), on the CPU.
        guided: for each evaluation whether branches other than "cond" are computed.
        index: number of completed evaluations.
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
        """Whether all evaluations are done."""
        return self.index == len(self.times)

    def active(self) -> Branches:
        """Return the branches that the next evaluation computes, "cond" first."""
        return self.branches if self.guided[self.index] else {"cond": self.branches["cond"]}


@dataclass(frozen=True)
class Evaluation:
    """The result of one denoise step for one image.

    Attributes:
        before: the latent that was evaluated, `[tokens, token_channels]` float32.
        time: time of the evaluation, from 1 to 0.
        branches: velocity of each computed branch, in the shape of `before`.
        velocity: the combination of these velocities.
    """

    before: Tensor
    time: float
    branches: dict[str, Tensor]
    velocity: Tensor

    def preview(self) -> Tensor:
        """Return the final latent, `[tokens, token_channels]`, that this velocity predicts, for a preview."""
        return self.before - self.time * self.velocity


@dataclass(frozen=True)
class FinishedImage:
    """A finished image.

    Attributes:
        image: `[height, width, 3]` uint8 RGB.
        pixels: `[3, height, width]` float32 as the autoencoder returned them, about -1 to 1.
        latent: the final latent, `[tokens, token_channels]` float32.
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
    """Compute the contexts of all branches of a request, and draw the first noise of its image.

    Args:
        model: the model.
        plan: prompts of the branches, including the thought if the model has generated one.
        parameters: parameters of the request.
        generator: generator of the request, on the CPU; None: a new one with the request's seed.
        prefill: the request's `Prefill` with contexts that were computed before, with the same generator; None: a new
            one.

    Raises:
        ParameterError: the model cannot generate an image of that size.
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
    """Return a new generator with the request's seed, on the CPU, so that a seed gives the same noise on any device."""
    return torch.Generator("cpu").manual_seed(parameters.seed)


class Denoiser:
    """Computes denoise steps of several images together. Caches token positions and marker embeddings."""

    def __init__(self, model: Bagel) -> None:
        self._model = model
        self._key: tuple[tuple[int, int, int], ...] | None = None
        self._kept: tuple[Layout, Tensor] | None = None

    @torch.inference_mode()
    def step(self, running: Sequence[RunningImage]) -> list[Evaluation]:
        """Compute one denoise step of each image, in one forward pass; return the evaluation of each image.

        Sizes, times, contexts and guidance of the images may differ. Each branch of an image is a row of the pass.
        Finished images are not allowed. After an exception, all images are unchanged.
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
        latents = [
            image.latent - evaluation.velocity * image.steps[image.index].item()
            for image, evaluation in zip(running, out, strict=True)
        ]
        for image, latent in zip(running, latents, strict=True):  # no statement below can fail
            image.latent = latent
            image.index += 1
        return out

    def _forward(self, running: Sequence[RunningImage], active: Sequence[Branches]) -> Sequence[Tensor]:
        """Run the model; return its prediction (the velocity of flow matching) for each row.

        A row is one guidance branch of one image. Each result is `[tokens, token_channels]`, float32.
        """
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
        """Return the layout of a pass's tokens, and the embeddings of all markers `[2 * rows, hidden]`.

        The last result is reused if contexts and lengths have not changed.

        Args:
            contexts: context of each row, i.e. of each branch of each image.
            lengths: number of latent tokens of each row.
        """
        rows = zip(contexts, lengths, strict=True)
        key = tuple((context.length, context.position, length) for context, length in rows)
        if self._kept is None or key != self._key:
            blocks = [length + MARKERS for length in lengths]
            layout = self._model.llm.block_layout(contexts, blocks, latents=True)
            self._key, self._kept = key, (layout, self._model.markers().repeat(len(lengths), 1))
        return self._kept


@torch.inference_mode()
def finish(model: Bagel, running: RunningImage) -> FinishedImage:
    """Decode the latent of an image whose denoise steps are done. The autoencoder processes one image, in float32."""
    return decode(model, running.latent, running.rows)


@torch.inference_mode()
def decode(model: Bagel, latent: Tensor, rows: int) -> FinishedImage:
    """Decode a latent `[tokens, token_channels]`, a grid with `rows` rows of tokens; also used for previews."""
    grid = images.to_latents(latent, rows, model.sizes.latent_patch)
    pixels = model.vae.decode(grid[None])[0]
    return FinishedImage(images.to_bytes(pixels), pixels, latent)
