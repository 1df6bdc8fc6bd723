"""Contents of the branches: thoughts, guidance by pictures, several texts and pictures, against a plain loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.bagel_generate import generate_image, prepare_image
from tests.support.bagel_runs import difference, golden, picture, run
from vllm_omni_ext.model_plugins.bagel.model import Bagel
from vllm_omni_ext.model_plugins.bagel.parameters import image_parameters
from vllm_omni_ext.model_plugins.bagel.prompts import THINK_THEN_ANSWER, THINK_THEN_DRAW, Part, Prompts

CLOSE = 1e-4
SMALL = {"height": 48, "width": 96, "num_timesteps": 5, "seed": 1, "max_think_token_n": 16}
SHORT = {"num_timesteps": 5, "seed": 1, "max_think_token_n": 16}
PAIR = {"cfg_img_scale": 1.7, "cfg_renorm_type": "channel", "cfg_renorm_min": 0.3}

CASES: dict[str, tuple[list[Part], dict[str, Any]]] = {
    "guidance by no picture": (["a red cat"], {**SMALL, "cfg_img_scale": 2.0}),
    "thought": (["a red cat"], {**SMALL, "think": True}),
    "thought, both kinds of guidance": (["a red cat"], {**SMALL, **PAIR, "think": True}),
    "thought before an edit": ([picture(60, 80, 1), "blue"], {**SHORT, "think": True}),
    "text, two pictures, text": (["x", picture(60, 80, 1), picture(200, 80, 2), "y"], {**SHORT, **PAIR}),
    "picture last": (["x", picture(60, 80, 1)], {**SHORT, "cfg_renorm_type": "global", "timestep_shift": 1.0}),
    "two texts": (["a red", "cat"], SMALL),
    "long and thin": ([picture(8, 90, 1), "blue"], SHORT),
}


@pytest.mark.parametrize("case", ["t2i", "t2i_nocfg", "edit"])
def test_the_plain_loop_equals_the_reference(case: str, plain: Any) -> None:
    expected = golden(f"{case}_fp32")
    trace = plain.run(expected.parts, expected.parameters)
    assert difference(trace.latent, expected.tensors["latent"]) < CLOSE


@pytest.mark.parametrize("case", CASES)
def test_latents_and_thoughts_equal_the_plain_loop(case: str, model: Bagel, plain: Any) -> None:
    parts, given = CASES[case]
    parameters = image_parameters(given, edit=any(not isinstance(part, str) for part in parts))
    trace = plain.run(parts, parameters)
    running, thought = prepare_image(model, parts, parameters)
    velocities = torch.stack([step.velocity for step in run(model, running)])
    assert thought == trace.thought
    assert (thought is not None) == parameters.think
    assert difference(velocities, torch.stack(trace.v)) < CLOSE
    assert difference(running.latent, trace.latent) < CLOSE


def test_a_given_thought_has_the_effect_of_the_models_own(model: Bagel) -> None:
    parameters = image_parameters({**SMALL, "think": True}, edit=False)
    own = generate_image(model, ["a cat"], parameters)
    given = generate_image(model, ["a cat"], parameters, thought=own.think_text)
    assert torch.equal(own.image.image, given.image.image)
    other = generate_image(model, ["a cat"], parameters, thought="a dog")
    assert other.think_text == "a dog"
    assert not torch.equal(own.image.image, other.image.image)


def test_branches_share_their_common_prefix_and_unused_ones_are_not_prefilled(model: Bagel) -> None:
    running, _ = prepare_image(model, [picture(60, 80, 1), "blue"], image_parameters(SHORT, edit=True))
    assert running.branches["cond"].before is running.branches["text"]
    for given, names in (
        ({"cfg_img_scale": 2.0}, ["cond", "text", "img"]),
        ({"cfg_text_scale": 1.0, "cfg_img_scale": 3.0}, ["cond"]),
        ({"cfg_interval": (0.0, 0.0)}, ["cond"]),
    ):
        running, _ = prepare_image(model, ["a cat"], image_parameters({**SMALL, **given}, edit=False))
        assert list(running.branches) == names


def test_a_request_that_thinks_begins_with_the_system_prompt(prompts: Prompts) -> None:
    draw, answer, text = ([*prompts.text(each).ids] for each in (THINK_THEN_DRAW, THINK_THEN_ANSWER, "a cat"))
    plan = prompts.image(["a cat"], think=True)
    assert [list(each.ids) for each in plan.text] == [draw]
    assert [list(each.ids) for each in plan.img] == [list(each.ids) for each in plan.cond] == [draw, text]
    assert [list(each.ids) for each in prompts.reply(["a cat"], think=True)] == [answer, text]
