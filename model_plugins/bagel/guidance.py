"""Computes the times of a request's denoise steps, and combines the velocities of the guidance branches.

A branch is a prompt with which the model predicts a velocity: the whole prompt, the prompt without its last text, or
the prompt without its pictures (see `prompts.ImagePlan`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_omni_ext.model_plugins.bagel.parameters import ImageParameters

_TINY = 1e-8


def schedule(parameters: ImageParameters) -> tuple[Tensor, Tensor]:
    """Return the time and the step length of each evaluation, i.e. denoise step, in order.

    Returns:
        Two tensors `[num_timesteps - 1]`, float32 on the CPU; times fall from 1 (noise) to 0 (image).
    """
    points = torch.linspace(1, 0, parameters.num_timesteps)
    points = parameters.timestep_shift * points / (1 + (parameters.timestep_shift - 1) * points)
    return points[:-1], points[:-1] - points[1:]


def guided_steps(parameters: ImageParameters, times: Tensor) -> list[bool]:
    """Return for each evaluation whether guidance is on: its time is in `cfg_interval`, and `cfg_text_scale` exceeds 1.

    Args:
        parameters: parameters of the request.
        times: time of each evaluation, float32 (see `schedule`).
    """
    after, until = parameters.cfg_interval
    return ((times > after) & (times <= until) & (parameters.cfg_text_scale > 1.0)).tolist()


def branch_names(parameters: ImageParameters) -> tuple[str, ...]:
    """Return the names of the branches that a request needs in at least one step: "cond", and "text" and "img" with
    guidance.
    """
    if not any(guided_steps(parameters, schedule(parameters)[0])):
        return ("cond",)
    return ("cond", "text", "img") if parameters.cfg_img_scale > 1.0 else ("cond", "text")


def guide(parameters: ImageParameters, cond: Tensor, text: Tensor, img: Tensor | None) -> Tensor:
    """Combine the velocities of an image's branches into one velocity.

    Args:
        parameters: parameters of the request.
        cond, text, img: velocities of the branches of `ImagePlan`, `[tokens, token_channels]` float32; `img` is None
            without guidance by pictures.

    Returns:
        The guided velocity, in the same shape.
    """
    guided = text + parameters.cfg_text_scale * (cond - text)
    if parameters.cfg_renorm_type == "text_channel":
        guided = _limited(guided, cond, parameters.cfg_renorm_min, each_token=True)
    if img is not None:
        guided = img + parameters.cfg_img_scale * (guided - img)
    if parameters.cfg_renorm_type != "text_channel":
        each_token = parameters.cfg_renorm_type == "channel"
        guided = _limited(guided, cond, parameters.cfg_renorm_min, each_token=each_token)
    return guided


def _limited(guided: Tensor, cond: Tensor, least: float, *, each_token: bool) -> Tensor:
    """Scale `guided` down to the norm of `cond` if the norm of `guided` is larger; the factor is at least `least`.

    Args:
        guided, cond: velocities `[tokens, token_channels]` float32.
        least: smallest factor.
        each_token: one norm and one factor for each token; False: one for the whole image.

    Returns:
        The scaled `guided`, in the same shape.
    """
    lengths = [
        torch.linalg.vector_norm(x, dim=-1, keepdim=True) if each_token else torch.linalg.vector_norm(x)
        for x in (cond, guided)
    ]
    return guided * (lengths[0] / (lengths[1] + _TINY)).clamp(min=least, max=1.0)
