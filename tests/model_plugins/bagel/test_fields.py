"""Fields of requests: names of the reference and of other servers, what is stronger, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_omni_ext.errors import RequestError
from vllm_omni_ext.model_plugins.bagel.requests.fields import REFUSED, Fields, Wanted, read_wanted
from vllm_omni_ext.model_plugins.bagel.requests.payloads import DitParams
from vllm_omni_ext.serving.options import RequestFields


def wanted(given: dict[str, Any], stage: DitParams | None = None, **configured: Any) -> Wanted:
    return read_wanted(RequestFields(Fields).read(given)[0], stage, configured)


def refusal(given: dict[str, Any], stage: DitParams | None = None, *, edit: bool = False) -> RequestError:
    with pytest.raises(RequestError) as caught:
        wanted(given, stage).parameters(edit=edit)
    assert str(caught.value).startswith(f"{caught.value.parameter}: ")
    return caught.value


def test_every_name_of_the_reference_and_of_other_servers() -> None:
    given = {
        "size": "96x64",
        "num_inference_steps": 7,
        "timestep_shift": 2,
        "seed": 5,
        "guidance_scale": 3.5,
        "guidance_scale_2": 1.5,
        "cfg_interval": [0, 0.5],
        "cfg_renorm_type": "channel",
        "cfg_renorm_min": 0.25,
        "think": True,
        "max_think_token_n": 9,
    }
    assert wanted(given).values == {
        "width": 96,
        "height": 64,
        "num_timesteps": 8,
        "timestep_shift": 2.0,
        "seed": 5,
        "cfg_text_scale": 3.5,
        "cfg_img_scale": 1.5,
        "cfg_interval": [0.0, 0.5],
        "cfg_renorm_type": "channel",
        "cfg_renorm_min": 0.25,
        "think": True,
        "max_think_token_n": 9,
    }
    assert wanted(given).parameters(edit=False).evaluations == 7
    assert wanted({"image_guidance_scale": 1.5}).values == {"cfg_img_scale": 1.5}


def test_a_request_is_stronger_than_the_stage_and_that_than_the_configuration_and_that_than_the_task() -> None:
    assert wanted({}).parameters(edit=False).cfg_interval == (0.4, 1.0)
    assert wanted({}).parameters(edit=True).cfg_interval == (0.0, 1.0)
    assert wanted({}, timestep_shift=4.0).parameters(edit=True).timestep_shift == 4.0
    stage = DitParams(timestep_shift=5.0)
    assert wanted({}, stage, timestep_shift=4.0).parameters(edit=True).timestep_shift == 5.0
    assert wanted({"timestep_shift": 6.0}, stage).parameters(edit=True).timestep_shift == 6.0


def test_auto_and_null_say_nothing() -> None:
    assert wanted({"size": "auto", "seed": None, "think": None}).values == {}


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"size": "big"}, "size"),
        ({"size": "64x64x64"}, "size"),
        ({"num_inference_steps": 0}, "num_inference_steps"),
        ({"num_inference_steps": 1000}, "num_inference_steps"),
        ({"num_inference_steps": 2.5}, "num_inference_steps"),
        ({"num_inference_steps": 7, "num_timesteps": 7}, "num_inference_steps"),
        ({"num_timesteps": 1}, "num_timesteps"),
        ({"num_timesteps": "8"}, "num_timesteps"),
        ({"num_timesteps": True}, "num_timesteps"),
        ({"size": "64x96", "width": 96}, "size"),
        ({"timestep_shift": 0}, "timestep_shift"),
        ({"timestep_shift": float("nan")}, "timestep_shift"),
        ({"seed": -1}, "seed"),
        ({"seed": 1 << 63}, "seed"),
        ({"cfg_interval": [0.5]}, "cfg_interval"),
        ({"cfg_interval": [0.9, 0.1]}, "cfg_interval"),
        ({"cfg_renorm_type": "none"}, "cfg_renorm_type"),
        ({"cfg_renorm_min": 1.5}, "cfg_renorm_min"),
        ({"max_think_token_n": 0}, "max_think_token_n"),
        ({"think": "yes"}, "think"),
        ({"previews": 17}, "previews"),
        ({"image.size": "big"}, "image.size"),
        ({"steps": 3}, "steps"),
    ],
)
def test_wrong_values_are_refused_by_their_name_in_the_request(given: dict[str, Any], name: str) -> None:
    assert refusal(given).parameter == name


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_model_has_not_is_refused_with_what_to_write_instead(name: str) -> None:
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
