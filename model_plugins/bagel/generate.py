"""One request from beginning to end, for a program without a scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_omni_ext.model_plugins.bagel.denoise import Denoiser, FinishedImage, RunningImage, begin, finish, seeded
from vllm_omni_ext.model_plugins.bagel.model import Bagel
from vllm_omni_ext.model_plugins.bagel.parameters import ImageParameters
from vllm_omni_ext.model_plugins.bagel.prefill import Prefill
from vllm_omni_ext.model_plugins.bagel.prompts import Part, Prompts
from vllm_omni_ext.model_plugins.bagel.text import write_text


@dataclass(frozen=True)
class Generated:
    """An image, and the plan that the model wrote for it; None if the request did not think."""

    image: FinishedImage
    think_text: str | None


def prepare_image(
    model: Bagel, parts: Sequence[Part], parameters: ImageParameters, *, thought: str | None = None
) -> tuple[RunningImage, str | None]:
    """Make an image request ready for its first step, and return its plan with it.

    Args:
        model: the model.
        parts: texts and pictures, in their order.
        parameters: of the request; with `think` in it the plan is `thought`, or is written here.
        thought: a plan from elsewhere, which is read as the model reads its own.

    Raises:
        ParameterError: the request can never succeed.
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
    """Reply to texts and pictures, greedily, with at most `max_tokens` ids, the reply's start included."""
    segments = Prompts(model.tokens, model.sizes).reply(parts, think=think)
    context = Prefill(model, seeded(ImageParameters())).context(segments)
    return write_text(model, context, max_tokens)
