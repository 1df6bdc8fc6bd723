"""Parameters: defaults of the tasks, and errors that name the parameter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from PIL import Image

from vllm_omni_ext.model_plugins.bagel.errors import ParameterError
from vllm_omni_ext.model_plugins.bagel.generate import generate_image
from vllm_omni_ext.model_plugins.bagel.guidance import guided_steps, schedule
from vllm_omni_ext.model_plugins.bagel.model import Bagel
from vllm_omni_ext.model_plugins.bagel.parameters import ImageParameters, image_parameters
from vllm_omni_ext.model_plugins.bagel.prompts import Prompts


def test_defaults_of_the_tasks() -> None:
    new, edit = image_parameters({}, edit=False), image_parameters({}, edit=True)
    assert (new.num_timesteps, new.timestep_shift, new.cfg_text_scale) == (50, 3.0, 4.0)
    assert (new.cfg_img_scale, new.cfg_interval, new.cfg_renorm_type) == (1.0, (0.4, 1.0), "global")
    assert (edit.cfg_img_scale, edit.cfg_interval, edit.cfg_renorm_type) == (2.0, (0.0, 1.0), "text_channel")
    assert image_parameters({"cfg_interval": [0, 0.5]}, edit=True).cfg_interval == (0, 0.5)


def test_default_steps() -> None:
    new, edit = image_parameters({}, edit=False), image_parameters({}, edit=True)
    assert len(schedule(new)[0]) == 49
    assert sum(guided_steps(new, schedule(new)[0])) == 41
    assert sum(guided_steps(edit, schedule(edit)[0])) == 49
    assert float(schedule(new)[1].sum()) == pytest.approx(1.0)


def test_the_interval_is_compared_in_float32() -> None:
    """0.4 as float32 is above 0.4: compared as Python numbers, guidance would be on there."""
    parameters = ImageParameters(num_timesteps=11, timestep_shift=1.0)
    times, _ = schedule(parameters)
    assert torch.isclose(times[6], torch.tensor(0.4))
    assert guided_steps(parameters, torch.tensor([1.0, 0.4, 0.39])) == [True, False, False]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("height", 0),
        ("width", 64.0),
        ("num_timesteps", 1),
        ("num_timesteps", True),
        ("num_timesteps", 10**9),
        ("timestep_shift", 0.0),
        ("timestep_shift", float("nan")),
        ("seed", -1),
        ("seed", 2**63),
        ("cfg_text_scale", float("inf")),
        ("cfg_img_scale", "2"),
        ("cfg_interval", (0.5,)),
        ("cfg_interval", (0.9, 0.1)),
        ("cfg_interval", 0.5),
        ("cfg_renorm_type", "none"),
        ("cfg_renorm_type", ["global"]),
        ("cfg_renorm_min", 1.5),
        ("think", "yes"),
        ("max_think_token_n", 0),
    ],
)
def test_a_wrong_value_is_named(name: str, value: Any) -> None:
    with pytest.raises(ParameterError, match=f"^{name}: ") as caught:
        image_parameters({name: value}, edit=False)
    assert caught.value.parameter == name


def test_an_unknown_name() -> None:
    with pytest.raises(ParameterError, match=r"guidance: is not known; use one of .*cfg_text_scale") as caught:
        image_parameters({"guidance": 3}, edit=False)
    assert caught.value.parameter == "guidance"


@pytest.mark.parametrize(("name", "size"), [("height", (100, 64)), ("width", (64, 272))])
def test_a_size_that_the_model_cannot_make(name: str, size: tuple[int, int], model: Bagel) -> None:
    given = dict(zip(("height", "width"), size, strict=True))
    with pytest.raises(ParameterError, match=f"^{name}: must be a multiple of 16, at most 256") as caught:
        generate_image(model, ["a cat"], image_parameters(given, edit=False))
    assert caught.value.parameter == name


def test_sizes_that_are_not_written(model: Bagel) -> None:
    assert ImageParameters().image_size(model.sizes, None) == (256, 256)
    assert ImageParameters(width=32).image_size(model.sizes, None) == (256, 32)
    assert ImageParameters(height=32, width=32).image_size(model.sizes, (64, 80)) == (64, 80)


@pytest.mark.parametrize("parts", [[], "a cat", [1], [b"x"], ["\ud800"]])
def test_a_prompt_that_is_none(parts: Any, prompts: Prompts) -> None:
    for plan in (prompts.image, prompts.reply):
        with pytest.raises(ParameterError, match=r"^prompt: ") as caught:
            plan(parts)
        assert caught.value.parameter == "prompt"


def test_an_empty_text_is_a_prompt(prompts: Prompts) -> None:
    assert prompts.image([""]).cond[0].length == 2
    assert prompts.image([Image.new("RGB", (60, 60))]).size == (64, 64)
