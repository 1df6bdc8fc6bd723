"""Which branch sees what: thoughts, guidance by pictures, several texts and pictures, against a plain loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.bagel_runs import difference, golden, picture, run
from vllm_omni_ext.model_plugins.bagel.generate import generate_image, generate_text, prepare_image
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
def test_the_plain_loop_says_what_the_reference_says(case: str, plain: Any) -> None:
    expected = golden(f"{case}_fp32")
    trace = plain.run(expected.parts, expected.parameters)
    assert difference(trace.latent, expected.tensors["latent"]) < CLOSE


@pytest.mark.parametrize("case", CASES)
def test_latents_and_thoughts(case: str, model: Bagel, plain: Any) -> None:
    parts, given = CASES[case]
    parameters = image_parameters(given, edit=any(not isinstance(part, str) for part in parts))
    trace = plain.run(parts, parameters)
    running, thought = prepare_image(model, parts, parameters)
    velocities = torch.stack([step.velocity for step in run(model, running)])
    assert thought == trace.thought
    assert (thought is not None) == parameters.think
    assert difference(velocities, torch.stack(trace.v)) < CLOSE
    assert difference(running.latent, trace.latent) < CLOSE


def test_a_thought_from_elsewhere_is_read_as_ones_own(model: Bagel) -> None:
    parameters = image_parameters({**SMALL, "think": True}, edit=False)
    own = generate_image(model, ["a cat"], parameters)
    given = generate_image(model, ["a cat"], parameters, thought=own.think_text)
    assert torch.equal(own.image.image, given.image.image)
    other = generate_image(model, ["a cat"], parameters, thought="a dog")
    assert other.think_text == "a dog"
    assert not torch.equal(own.image.image, other.image.image)


def test_branches_share_what_they_have_in_common(model: Bagel, prompts: Prompts) -> None:
    parameters = image_parameters(SHORT, edit=True)
    running, _ = prepare_image(model, [picture(60, 80, 1), "blue"], parameters)
    assert running.branches["cond"].before is running.branches["text"]
    running, _ = prepare_image(model, ["a cat"], image_parameters({**SMALL, "cfg_img_scale": 2.0}, edit=False))
    assert running.branches["cond"].length == running.branches["img"].length
    assert running.branches["text"].length == 0


def test_guidance_that_is_never_on_is_not_prefilled(model: Bagel) -> None:
    for given in ({"cfg_text_scale": 1.0, "cfg_img_scale": 3.0}, {"cfg_interval": (0.0, 0.0)}):
        running, _ = prepare_image(model, ["a cat"], image_parameters({**SMALL, **given}, edit=False))
        assert list(running.branches) == ["cond"]


def test_system_prompts(prompts: Prompts) -> None:
    plan = prompts.image(["a cat"], think=True)
    assert [list(each.ids) for each in plan.text] == [list(prompts.text(THINK_THEN_DRAW).ids)]
    assert [each.length for each in plan.img] == [each.length for each in plan.cond]
    reply = prompts.reply(["a cat"], think=True)
    assert [list(each.ids) for each in reply] == [list(prompts.text(t).ids) for t in (THINK_THEN_ANSWER, "a cat")]


def test_text_from_beginning_to_end(model: Bagel) -> None:
    expected = golden("understand_fp32")
    assert generate_text(model, expected.parts, max_tokens=24) == expected.info["text"][0]
