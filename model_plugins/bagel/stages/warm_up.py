"""Warms the model up before the first request: compiles the layers, and lets libraries choose their kernels."""

from __future__ import annotations

import logging

from vllm_omni_ext.model_plugins.bagel.denoise import Denoiser, RunningImage, begin, finish
from vllm_omni_ext.model_plugins.bagel.model import Bagel
from vllm_omni_ext.model_plugins.bagel.parameters import image_parameters
from vllm_omni_ext.model_plugins.bagel.prompts import Prompts

_STEPS = 2
"""Points in time of a picture: two are one denoise step."""

log = logging.getLogger(__name__)


def warm_up(model: Bagel, *, compiled: bool) -> None:
    """Make pictures of the smallest size, one alone and then two together.

    Args:
        model: the model with its weights.
        compiled: compile the layers first. If that fails, the reason is logged, and the layers stay as they are.
    """
    if compiled:
        model.llm.compile_layers()
        try:
            _make(model)
            return
        except Exception as error:  # a compiler may fail in many ways, and the model works without one
            log.warning("the layers cannot be compiled, so their operators run one by one: %s", error)
            model.llm.do_not_compile_layers()
    _make(model)


def _make(model: Bagel) -> None:
    denoiser = Denoiser(model)
    denoiser.step([_smallest(model)])
    pictures = [_smallest(model), _smallest(model)]
    denoiser.step(pictures)
    finish(model, pictures[0])


def _smallest(model: Bagel) -> RunningImage:
    side = model.sizes.token_pixels
    parameters = image_parameters({"height": side, "width": side, "num_timesteps": _STEPS}, edit=False)
    return begin(model, Prompts(model.tokens, model.sizes).image(["."]), parameters)
