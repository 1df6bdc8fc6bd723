"""Times of a request's steps, and how the branches' velocities become one."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_omni_ext.model_plugins.bagel.parameters import ImageParameters

_TINY = 1e-8


def schedule(parameters: ImageParameters) -> tuple[Tensor, Tensor]:
    """Time of each evaluation, and how far the step after it goes: `[num_timesteps - 1]` float32 on the CPU each."""
    points = torch.linspace(1, 0, parameters.num_timesteps)
    points = parameters.timestep_shift * points / (1 + (parameters.timestep_shift - 1) * points)
    return points[:-1], points[:-1] - points[1:]


def guided_steps(parameters: ImageParameters, times: Tensor) -> list[bool]:
    """For each evaluation whether guidance is on. Compared as float32, as the times are."""
    after, until = parameters.cfg_interval
    return ((times > after) & (times <= until) & (parameters.cfg_text_scale > 1.0)).tolist()


def branch_names(parameters: ImageParameters) -> tuple[str, ...]:
    """The branches that a request computes at any time, as `ImagePlan` names them."""
    if not any(guided_steps(parameters, schedule(parameters)[0])):
        return ("cond",)
    return ("cond", "text", "img") if parameters.cfg_img_scale > 1.0 else ("cond", "text")


def guide(parameters: ImageParameters, cond: Tensor, text: Tensor, img: Tensor | None) -> Tensor:
    """One velocity out of those of the branches.

    Args:
        parameters: of the request.
        cond, text, img: `[tokens, token_channels]` float32, as `ImagePlan` names the branches; `img` is None without
            guidance by pictures.

    Returns:
        The same shape.
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
    """Make `guided` no longer than `cond`, by a factor of at least `least`."""
    lengths = [
        torch.linalg.vector_norm(x, dim=-1, keepdim=True) if each_token else torch.linalg.vector_norm(x)
        for x in (cond, guided)
    ]
    return guided * (lengths[0] / (lengths[1] + _TINY)).clamp(min=least, max=1.0)
