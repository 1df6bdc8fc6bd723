"""Outputs equal those of the reference implementation on the tiny checkpoint."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch

from tests.support.bagel_generate import step_text, write_text
from tests.support.bagel_runs import GOLDEN, difference, golden, run, stacked
from vllm_omni_ext.model_plugins.bagel.context import Context
from vllm_omni_ext.model_plugins.bagel.denoise import begin, finish, seeded
from vllm_omni_ext.model_plugins.bagel.images import resize, to_rgb
from vllm_omni_ext.model_plugins.bagel.model import Bagel
from vllm_omni_ext.model_plugins.bagel.prefill import Prefill
from vllm_omni_ext.model_plugins.bagel.prompts import Prompts, TextSegment
from vllm_omni_ext.model_plugins.bagel.text import RunningText

CLOSE = 1e-4
"""In float32; a wrong variant of any part is off by 5e-3 at least."""

MAX_TOKENS = 24
BRANCHES = {"t2i": ("cond", "text"), "t2i_nocfg": ("cond",), "edit": ("cond", "text", "img")}
GUIDED = {"t2i": 6, "t2i_nocfg": 0, "edit": 7}
"""Evaluations with guidance, of 7."""

BF16_LATENT = 4e-2
"""Relative L2."""
BF16_LOGITS = 0.3


def joined(context: Context, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = zip(*context.pieces(layer), strict=True)
    return torch.cat(keys), torch.cat(values)


def text_ids(segments: tuple[object, ...]) -> list[list[int]]:
    return [list(each.ids) for each in segments if isinstance(each, TextSegment)]


def test_the_files_are_those_of_the_manifest() -> None:
    for name, entry in json.loads((GOLDEN / "manifest.json").read_text())["files"].items():
        assert hashlib.sha256((GOLDEN / name).read_bytes()).hexdigest() == entry["sha256"], name


@pytest.mark.parametrize("case", BRANCHES)
def test_prompt_contexts_steps_and_image_equal_the_reference(case: str, model: Bagel, prompts: Prompts) -> None:
    expected = golden(f"{case}_fp32")
    tensors, parameters = expected.tensors, expected.parameters
    plan = prompts.image(expected.parts)
    assert text_ids(plan.cond) == expected.info["prompt_ids"][:1]
    running = begin(model, plan, parameters)
    assert tuple(running.branches) == BRANCHES[case]
    prefill = Prefill(model, seeded(parameters))
    for name, segments in (("cond", plan.cond), ("text", plan.text), ("img", plan.img)):
        context = running.branches[name] if name in running.branches else prefill.context(segments)
        assert [context.length, context.position] == [tensors[f"{part}_{name}"].item() for part in ("kvlen", "rope")]
        if f"kv_k_{name}" in tensors and context.length:
            layers = [joined(context, layer) for layer in range(model.sizes.llm.layers)]
            assert difference(torch.stack([k for k, _ in layers]), tensors[f"kv_k_{name}"]) < CLOSE
            assert difference(torch.stack([v for _, v in layers]), tensors[f"kv_v_{name}"]) < CLOSE
    assert torch.equal(running.latent, tensors["init_noise"])
    assert difference(running.times, tensors["timesteps"]) < 1e-7
    steps = run(model, running)
    assert len(steps) == parameters.evaluations == 7
    assert sum("text" in step.branches for step in steps) == GUIDED[case]
    assert difference(torch.stack([step.before for step in steps]), tensors["x_t"]) < CLOSE
    if "v_t" in tensors:
        assert difference(torch.stack([step.velocity for step in steps]), tensors["v_t"]) < CLOSE
        for name in running.branches:
            found = stacked(steps, name)
            assert difference(found, tensors[f"v_{name}_branch"][: len(found)]) < CLOSE
    finished = finish(model, running)
    assert difference(finished.latent, tensors["latent"]) < CLOSE
    assert difference(finished.pixels, tensors["image_f32"]) < CLOSE
    assert finished.image.shape == tensors["image_u8"].shape
    off = (finished.image.int() - tensors["image_u8"].int()).abs()
    assert off.max() <= 1
    assert (off > 0).float().mean() <= 1e-3


def test_the_input_picture_of_an_edit_equals_the_reference(model: Bagel, prompts: Prompts) -> None:
    tensors = golden("edit_fp32").tensors
    source = golden("edit_fp32").parts[0]
    assert not isinstance(source, str)
    small = resize(to_rgb(source), model.sizes.vae_resize)
    latents, patches = prompts.latents(small), prompts.patches(small)
    assert torch.equal(latents.pixels[None], tensors["vae_pixels_0"])
    assert torch.equal(patches.patches, tensors["vit_tokens_0"])
    assert torch.equal(patches.places, tensors["vit_pos_0"])
    parameters = golden("edit_fp32").parameters
    assert torch.equal(
        torch.randn(tensors["vae_enc_noise_0"].shape, generator=seeded(parameters)), tensors["vae_enc_noise_0"]
    )
    drawn = Prefill(model, seeded(parameters)).draw_latents(latents.pixels)
    assert difference(drawn[None], tensors["vae_enc_latent_0"]) < CLOSE
    with torch.inference_mode():
        seen = model.vision.connect(patches.patches, patches.places)
    assert difference(seen, tensors["connector_out_0"]) < CLOSE


@pytest.mark.parametrize("case", ["chat", "understand"])
def test_replies_equal_the_reference(case: str, model: Bagel, prompts: Prompts) -> None:
    expected = golden(f"{case}_fp32")
    segments = prompts.reply(expected.parts)
    assert text_ids(segments) == expected.info["prompt_ids"][:1]
    context = Prefill(model, torch.Generator()).context(segments)
    running = RunningText(model, context, MAX_TOKENS)
    logits = torch.cat([step_text(model, [running]) for _ in range(MAX_TOKENS)])
    assert running.ids[:MAX_TOKENS] == expected.info["generated_ids"][0]
    assert difference(logits, expected.tensors["logits"]) < CLOSE
    assert write_text(model, context, MAX_TOKENS) == expected.info["text"][0]


@pytest.mark.parametrize("case", ["t2i", "t2i_nocfg"])
def test_an_image_in_bfloat16_is_close_to_the_reference(case: str, model_bf16: Bagel, prompts: Prompts) -> None:
    expected = golden(f"{case}_bf16")
    running = begin(model_bf16, prompts.image(expected.parts), expected.parameters)
    run(model_bf16, running)
    finished = finish(model_bf16, running)
    wanted = expected.tensors["latent"]
    assert (finished.latent - wanted).norm() / wanted.norm() <= BF16_LATENT
    off = (finished.image.int() - expected.tensors["image_u8"].int()).abs().float()
    assert off.mean() <= 2
    assert off.max() <= 16


def test_a_reply_in_bfloat16_is_close_to_the_reference(model_bf16: Bagel, prompts: Prompts) -> None:
    """Fed with the reference's ids: one token that differs would make all that follow differ."""
    expected = golden("understand_bf16")
    parts = golden("understand_fp32").parts
    context = Prefill(model_bf16, torch.Generator()).context(prompts.reply(parts))
    running = RunningText(model_bf16, context, MAX_TOKENS)
    logits = []
    for id_ in expected.info["generated_ids"][0]:
        running.ids[-1] = id_
        logits.append(step_text(model_bf16, [running]))
    assert difference(torch.cat(logits), expected.tensors["logits"]) <= BF16_LOGITS
