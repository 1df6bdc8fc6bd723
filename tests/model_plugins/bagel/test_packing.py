"""Requests in one forward pass: each gets what it gets alone, whoever else is there, comes or goes."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.bagel_runs import difference, picture, run
from vllm_omni_ext.model_plugins.bagel.attention import Rows, sdpa
from vllm_omni_ext.model_plugins.bagel.denoise import Denoiser, RunningImage, begin, decode, finish, seeded
from vllm_omni_ext.model_plugins.bagel.generate import prepare_image
from vllm_omni_ext.model_plugins.bagel.model import Bagel
from vllm_omni_ext.model_plugins.bagel.parameters import image_parameters
from vllm_omni_ext.model_plugins.bagel.prefill import Prefill
from vllm_omni_ext.model_plugins.bagel.prompts import Part, Prompts
from vllm_omni_ext.model_plugins.bagel.text import RunningText, step_text

CLOSE = 2e-5
"""Sums are taken in another order when there are more rows."""

SIZES = ((64, 96), (48, 64), (96, 32), (0, 0), (0, 0))
REQUESTS = (
    {"num_timesteps": 8, "seed": 1},
    {"num_timesteps": 6, "seed": 2, "cfg_text_scale": 1.0, "timestep_shift": 1.0},
    {"num_timesteps": 9, "seed": 3, "cfg_img_scale": 1.7, "cfg_renorm_type": "channel", "cfg_renorm_min": 0.2},
    {"num_timesteps": 7, "seed": 4},
    {"num_timesteps": 5, "seed": 5, "cfg_renorm_type": "global", "cfg_interval": (0.2, 0.9)},
)
PROMPTS: tuple[list[Part], ...] = (
    ["a small red fox"],
    ["snow"],
    ["a lake in the morning"],
    [picture(60, 80, 1), "make it blue"],
    [picture(90, 50, 2), picture(50, 50, 3), "put the one on the other"],
)


def prepared(model: Bagel, at: int) -> RunningImage:
    given = dict(REQUESTS[at])
    if SIZES[at] != (0, 0):
        given |= dict(zip(("height", "width"), SIZES[at], strict=True))
    edit = not isinstance(PROMPTS[at][0], str)
    return prepare_image(model, PROMPTS[at], image_parameters(given, edit=edit))[0]


@pytest.fixture(scope="module")
def alone(model: Bagel) -> list[Tensor]:
    """Latents of the requests, one by one."""
    latents = []
    for at in range(len(REQUESTS)):
        running = prepared(model, at)
        run(model, running)
        latents.append(running.latent)
    return latents


def step_all(model: Bagel, running: list[RunningImage], denoiser: Denoiser | None = None) -> int:
    denoiser, steps = denoiser or Denoiser(model), 0
    while left := [image for image in running if not image.done]:
        denoiser.step(left)
        steps += 1
    return steps


def test_five_different_requests(model: Bagel, alone: list[Tensor]) -> None:
    running = [prepared(model, at) for at in range(len(REQUESTS))]
    assert step_all(model, running) == max(request["num_timesteps"] for request in REQUESTS) - 1
    for image, expected in zip(running, alone, strict=True):
        assert difference(image.latent, expected) < CLOSE


def test_all_rows_go_through_the_layers_in_one_pass(model: Bagel, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []

    def counted(query: Tensor, key: Tensor, value: Tensor, of: Rows) -> Tensor:
        rows.append(len(of.queries))
        return sdpa(query, key, value, of)

    running = [prepared(model, at) for at in range(len(REQUESTS))]
    monkeypatch.setattr(model.llm, "attention", counted)
    Denoiser(model).step(running)
    assert rows == [2 + 1 + 3 + 3 + 1] * model.sizes.llm.layers


def test_requests_come_at_any_step(model: Bagel, alone: list[Tensor]) -> None:
    denoiser, running = Denoiser(model), [prepared(model, 3)]
    for at in (0, 4, 1, 2):
        denoiser.step([image for image in running if not image.done])
        running.append(prepared(model, at))
    step_all(model, running, denoiser)
    for image, at in zip(running, (3, 0, 4, 1, 2), strict=True):
        assert difference(image.latent, alone[at]) < CLOSE


def test_one_that_is_dropped_leaves_the_others_alone_and_nothing_behind(model: Bagel, alone: list[Tensor]) -> None:
    denoiser, running = Denoiser(model), [prepared(model, at) for at in range(len(REQUESTS))]
    for _ in range(3):
        denoiser.step(running)
    dropped = weakref.ref(running[3]), *(weakref.ref(context) for context in running[3].branches.values())
    del running[3]
    gc.collect()
    assert [each() for each in dropped] == [None] * 4
    step_all(model, running, denoiser)
    for image, expected in zip(running, [*alone[:3], alone[4]], strict=True):
        assert difference(image.latent, expected) < CLOSE


def test_the_same_seed_gives_the_same_bits_and_another_one_another_image(model: Bagel) -> None:
    images = []
    for seed in (7, 7, 8):
        given = {"height": 48, "width": 48, "num_timesteps": 4, "seed": seed}
        running, _ = prepare_image(model, ["a cat"], image_parameters(given, edit=False))
        run(model, running)
        images.append(finish(model, running).image)
    assert torch.equal(images[0], images[1])
    assert not torch.equal(images[0], images[2])


def test_images_of_one_prompt_share_its_contexts(model: Bagel, prompts: Prompts) -> None:
    plan = prompts.image(["a cat"])
    given = [{"height": 48, "width": 48, "num_timesteps": 4, "seed": seed} for seed in (7, 8)]
    parameters = [image_parameters(each, edit=False) for each in given]
    prefill = Prefill(model, seeded(parameters[0]))
    together = [begin(model, plan, each, generator=seeded(each), prefill=prefill) for each in parameters]
    assert together[0].branches["cond"] is together[1].branches["cond"]
    step_all(model, together)
    for image, each in zip(together, parameters, strict=True):
        alone = begin(model, plan, each)
        run(model, alone)
        assert difference(image.latent, alone.latent) < CLOSE


def test_contexts_can_be_computed_one_segment_at_a_time(model: Bagel) -> None:
    parameters = image_parameters(REQUESTS[4], edit=True)
    plan = Prompts(model.tokens, model.sizes).image(PROMPTS[4])
    generator = seeded(parameters)
    prefill = Prefill(model, generator)
    for end in range(1, len(plan.cond) + 1):
        prefill.context(plan.cond[:end])
    by_segment = begin(model, plan, parameters, generator=generator, prefill=prefill)
    at_once = begin(model, plan, parameters)
    assert torch.equal(by_segment.latent, at_once.latent)
    for layer in range(model.sizes.llm.layers):
        pairs = zip(by_segment.branches["cond"].joined(layer), at_once.branches["cond"].joined(layer), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)


def test_the_random_state_of_the_process_is_left_alone(model: Bagel) -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    prepared(model, 3)
    assert torch.equal(torch.rand(2), expected)


def test_the_last_preview_is_the_image(model: Bagel) -> None:
    running = prepared(model, 1)
    steps = run(model, running)
    assert difference(steps[-1].preview(), running.latent) < 1e-6
    early = decode(model, steps[0].preview(), running.rows)
    assert early.image.shape == finish(model, running).image.shape
    assert not torch.equal(early.image, finish(model, running).image)


def dense(query: Tensor, key: Tensor, value: Tensor, rows: Rows) -> Tensor:
    """All rows at once, with one mask over everything: what a kernel for rows of any length must come to."""
    of_query, of_key = (
        torch.repeat_interleave(torch.arange(len(rows.queries)), starts.diff().long())
        for starts in (rows.query_starts, rows.key_starts)
    )
    mask = of_query[:, None] == of_key[None]
    if rows.causal:
        from_end_q, from_end_k = (
            starts[1:].long()[of_] - torch.arange(len(of_))
            for starts, of_ in ((rows.query_starts, of_query), (rows.key_starts, of_key))
        )
        mask &= from_end_k[None] >= from_end_q[:, None]
    parts = (part.transpose(0, 1) for part in (query, key, value))
    return F.scaled_dot_product_attention(*parts, attn_mask=mask, enable_gqa=True).transpose(0, 1)


def test_another_attention_can_take_its_place(
    model: Bagel, alone: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model.llm, "attention", dense)
    running = [prepared(model, at) for at in range(len(REQUESTS))]
    step_all(model, running)
    for image, expected in zip(running, alone, strict=True):
        assert difference(image.latent, expected) < CLOSE


def test_replies_together_are_those_of_each_alone(model: Bagel, prompts: Prompts) -> None:
    asked: list[list[Part]] = [["hello"], [picture(60, 80, 1), "what is it"], ["name three", "animals"]]
    limits = (70, 12, 30)
    contexts = [Prefill(model, torch.Generator()).context(prompts.reply(parts)) for parts in asked]

    def replies(groups: list[list[int]]) -> dict[int, list[int]]:
        found = {}
        for group in groups:
            running = {at: RunningText(model, contexts[at], limits[at]) for at in group}
            while left := [reply for reply in running.values() if not reply.done]:
                step_text(model, left)
            found |= {at: reply.ids for at, reply in running.items()}
        return found

    together = replies([[0, 1, 2]])
    assert together == replies([[0], [1], [2]])
    assert {at: len(ids) for at, ids in together.items()} == dict(enumerate(limits))
