"""Fields of requests: names of the reference and of other servers, their order of precedence, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from PIL import Image

from tests.support.bagel_generate import generate_image
from vllm_omni_ext.errors import RequestError
from vllm_omni_ext.model_plugins.bagel.guidance import guided_steps, schedule
from vllm_omni_ext.model_plugins.bagel.model import Bagel
from vllm_omni_ext.model_plugins.bagel.parameters import ImageParameters, ParameterError, image_parameters
from vllm_omni_ext.model_plugins.bagel.prompts import Prompts
from vllm_omni_ext.model_plugins.bagel.requests.fields import REFUSED, Fields, RequestedParameters, requested_parameters
from vllm_omni_ext.model_plugins.bagel.requests.payloads import DitParams
from vllm_omni_ext.serving.options import RequestFields


def wanted(given: dict[str, Any], stage: DitParams | None = None, **configured: Any) -> RequestedParameters:
    return requested_parameters(RequestFields(Fields).read(given)[0], stage, configured)


def refusal(given: dict[str, Any], stage: DitParams | None = None, *, edit: bool = False) -> RequestError:
    with pytest.raises(RequestError) as caught:
        wanted(given, stage).parameters(edit=edit)
    assert str(caught.value).startswith(f"{caught.value.parameter}: ")
    return caught.value


def test_every_name_of_the_reference_and_of_other_servers() -> None:
    same = {
        "timestep_shift": 2,
        "seed": 5,
        "cfg_interval": [0, 0.5],
        "cfg_renorm_type": "channel",
        "cfg_renorm_min": 0.25,
        "think": True,
        "max_think_token_n": 9,
    }
    given = {"size": "96x64", "num_inference_steps": 7, "guidance_scale": 3.5, "guidance_scale_2": 1.5}
    read = {"width": 96, "height": 64, "num_timesteps": 8, "cfg_text_scale": 3.5, "cfg_img_scale": 1.5}
    assert wanted(given | same).values == read | same
    assert wanted(given).parameters(edit=False).evaluations == 7
    assert wanted({"image_guidance_scale": 1.5}).values == {"cfg_img_scale": 1.5}
    assert wanted({"size": "auto", "seed": None, "think": None}).values == {}


def test_precedence_is_request_then_stage_then_configuration_then_task() -> None:
    assert wanted({}).parameters(edit=False).cfg_interval == (0.4, 1.0)
    assert wanted({}).parameters(edit=True).cfg_interval == (0.0, 1.0)
    assert wanted({}, timestep_shift=4.0).parameters(edit=True).timestep_shift == 4.0
    stage = DitParams(timestep_shift=5.0)
    assert wanted({}, stage, timestep_shift=4.0).parameters(edit=True).timestep_shift == 5.0
    assert wanted({"timestep_shift": 6.0}, stage).parameters(edit=True).timestep_shift == 6.0


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"size": "big"}, "size"),
        ({"size": "64x64x64"}, "size"),
        ({"num_inference_steps": 0}, "num_inference_steps"),
        ({"num_inference_steps": 2.5}, "num_inference_steps"),
        ({"num_inference_steps": 7, "num_timesteps": 7}, "num_inference_steps"),
        ({"num_timesteps": 1}, "num_timesteps"),
        ({"num_timesteps": "8"}, "num_timesteps"),
        ({"size": "64x96", "width": 96}, "size"),
        ({"timestep_shift": 0}, "timestep_shift"),
        ({"seed": -1}, "seed"),
        ({"cfg_interval": [0.5]}, "cfg_interval"),
        ({"cfg_interval": [0.9, 0.1]}, "cfg_interval"),
        ({"cfg_renorm_type": "none"}, "cfg_renorm_type"),
        ({"think": "yes"}, "think"),
        ({"previews": 17}, "previews"),
        ({"image.size": "big"}, "image.size"),
        ({"steps": 3}, "steps"),
    ],
)
def test_wrong_values_are_refused_by_their_name_in_the_request(given: dict[str, Any], name: str) -> None:
    assert refusal(given).parameter == name


@pytest.mark.parametrize("name", REFUSED)
def test_an_unavailable_field_is_refused_with_its_replacement(name: str) -> None:
    error = refusal({name: "something"})
    assert error.parameter == name
    assert REFUSED[name] in str(error)
    assert wanted({name: None}).values == wanted({name: ""}).values == {}


def test_parameters_of_the_stage_are_refused_by_their_own_names() -> None:
    assert refusal({}, DitParams(cfg_interval=(0.9, 0.1))).parameter == "dit.cfg_interval"
    assert refusal({"cfg_renorm_min": 2.0}, DitParams(cfg_renorm_min=0.5)).parameter == "cfg_renorm_min"


def test_an_edit_has_the_size_of_its_picture() -> None:
    assert wanted({"size": "96x64"}).parameters(edit=True).height is None
    wanted({"size": "96x64"}).refuse_other_size((64, 96))
    wanted({}, DitParams(height=512), height=512).refuse_other_size((64, 96))
    for given, stage, name in (
        ({"size": "96x80"}, None, "size"),
        ({"width": 64}, None, "width"),
        ({}, DitParams(height=512), "dit.height"),
    ):
        with pytest.raises(RequestError, match="96x64") as caught:
            wanted(given, stage).refuse_other_size((64, 96))
        assert caught.value.parameter == name


# -- the model's own parameters ------------------------------------------------------------------------


def test_defaults_of_the_tasks() -> None:
    new, edit = image_parameters({}, edit=False), image_parameters({}, edit=True)
    assert (new.num_timesteps, new.timestep_shift, new.cfg_text_scale) == (50, 3.0, 4.0)
    assert (new.cfg_img_scale, new.cfg_interval, new.cfg_renorm_type) == (1.0, (0.4, 1.0), "global")
    assert (edit.cfg_img_scale, edit.cfg_interval, edit.cfg_renorm_type) == (2.0, (0.0, 1.0), "text_channel")
    times, steps = schedule(new)
    assert (len(times), sum(guided_steps(new, times)), sum(guided_steps(edit, times))) == (49, 41, 49)
    assert float(steps.sum()) == pytest.approx(1.0)


def test_the_interval_is_compared_in_float32() -> None:
    """0.4 as float32 is above 0.4: compared as Python numbers, guidance would be on there."""
    parameters = ImageParameters(num_timesteps=11, timestep_shift=1.0)
    times, _ = schedule(parameters)
    assert torch.isclose(times[6], torch.tensor(0.4))
    assert guided_steps(parameters, torch.tensor([1.0, 0.4, 0.39])) == [True, False, False]


WRONG: dict[str, list[Any]] = {
    "height": [0],
    "width": [64.0],
    "num_timesteps": [1, True, 10**9],
    "timestep_shift": [0.0, float("nan")],
    "seed": [-1, 2**63],
    "cfg_text_scale": [float("inf")],
    "cfg_img_scale": ["2"],
    "cfg_interval": [(0.5,), (0.9, 0.1), 0.5, (0.4, 1.2), (-0.1, 1.0), (40, 100)],
    "cfg_renorm_type": ["none", ["global"]],
    "cfg_renorm_min": [1.5],
    "think": ["yes"],
    "max_think_token_n": [0],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_wrong_value_is_refused_by_its_name(name: str, value: Any) -> None:
    with pytest.raises(ParameterError, match=f"^{name}: ") as caught:
        image_parameters({name: value}, edit=False)
    assert caught.value.parameter == name


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ParameterError, match=r"guidance: is not known; use one of .*cfg_text_scale") as caught:
        image_parameters({"guidance": 3}, edit=False)
    assert caught.value.parameter == "guidance"


@pytest.mark.parametrize(("name", "size"), [("height", (100, 64)), ("width", (64, 272))])
def test_a_size_that_the_model_cannot_make(name: str, size: tuple[int, int], model: Bagel) -> None:
    given = dict(zip(("height", "width"), size, strict=True))
    with pytest.raises(ParameterError, match=f"^{name}: must be a multiple of 16, at most 256") as caught:
        generate_image(model, ["a cat"], image_parameters(given, edit=False))
    assert caught.value.parameter == name


def test_a_missing_size_is_the_largest_or_that_of_the_picture(model: Bagel) -> None:
    assert ImageParameters().image_size(model.sizes, None) == (256, 256)
    assert ImageParameters(width=32).image_size(model.sizes, None) == (256, 32)
    assert ImageParameters(height=32, width=32).image_size(model.sizes, (64, 80)) == (64, 80)


@pytest.mark.parametrize("parts", [[], "a cat", [1], [b"x"], ["\ud800"]])
def test_a_prompt_without_texts_and_pictures_is_refused(parts: Any, prompts: Prompts) -> None:
    for plan in (prompts.image, prompts.reply):
        with pytest.raises(ParameterError, match=r"^prompt: ") as caught:
            plan(parts)
        assert caught.value.parameter == "prompt"


def test_an_empty_text_is_a_prompt(prompts: Prompts) -> None:
    assert prompts.image([""]).cond[0].length == 2
    assert prompts.image([Image.new("RGB", (60, 60))]).size == (64, 64)
