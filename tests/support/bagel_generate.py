"""Runs one request of BAGEL from beginning to end, without a scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_omni_ext.model_plugins.bagel.context import Context
from vllm_omni_ext.model_plugins.bagel.denoise import Denoiser, FinishedImage, RunningImage, begin, finish, seeded
from vllm_omni_ext.model_plugins.bagel.model import Bagel
from vllm_omni_ext.model_plugins.bagel.parameters import ImageParameters
from vllm_omni_ext.model_plugins.bagel.prefill import Prefill
from vllm_omni_ext.model_plugins.bagel.prompts import Part, Prompts
from vllm_omni_ext.model_plugins.bagel.text import RunningText, next_logits


@dataclass(frozen=True)
class Generated:
    """An image, and the plan that the model wrote for it; the plan is None if the request did not think."""

    image: FinishedImage
    think_text: str | None


def prepare_image(
    model: Bagel, parts: Sequence[Part], parameters: ImageParameters, *, thought: str | None = None
) -> tuple[RunningImage, str | None]:
    """Prepare an image request for its first step; return it with its plan.

    Args:
        model: the model.
        parts: texts and pictures, in their order.
        parameters: of the request; with `think`, the plan is `thought`, or is generated here.
        thought: a given plan, which is prefilled like a generated one.

    Raises:
        ParameterError: the request cannot succeed in this form.
    """
    prompts = Prompts(model.tokens, model.sizes)
    plan = prompts.image(parts, think=parameters.think)
    parameters.image_size(model.sizes, plan.size)
    generator = seeded(parameters)
    prefill = Prefill(model, generator)
    if parameters.think:
        if thought is None:
            thought = write_text(model, prefill.context(plan.cond), parameters.max_think_token_n)
        plan = plan.with_thought(prompts.text(thought))
    else:
        thought = None
    return begin(model, plan, parameters, generator=generator, prefill=prefill), thought


def generate_image(
    model: Bagel, parts: Sequence[Part], parameters: ImageParameters, *, thought: str | None = None
) -> Generated:
    """Make an image; arguments and errors are those of `prepare_image`."""
    running, written = prepare_image(model, parts, parameters, thought=thought)
    denoiser = Denoiser(model)
    while not running.done:
        denoiser.step([running])
    return Generated(finish(model, running), written)


def generate_text(model: Bagel, parts: Sequence[Part], *, max_tokens: int = 1000, think: bool = False) -> str:
    """Reply to texts and pictures greedily, with at most `max_tokens` ids, including the reply's start."""
    segments = Prompts(model.tokens, model.sizes).reply(parts, think=think)
    context = Prefill(model, seeded(ImageParameters())).context(segments)
    return write_text(model, context, max_tokens)


@torch.inference_mode()
def step_text(model: Bagel, running: Sequence[RunningText]) -> Tensor:
    """Compute the last id of each reply and choose the next one, greedily; return `next_logits`."""
    logits = next_logits(model, running)
    for reply, id_ in zip(running, logits.argmax(-1).tolist(), strict=True):
        reply.add(id_)
    return logits


def write_text(model: Bagel, context: Context, max_tokens: int) -> str:
    """Generate one reply after the context."""
    running = RunningText(model, context, max_tokens)
    while not running.done:
        step_text(model, [running])
    return model.tokens.reply(running.ids)
