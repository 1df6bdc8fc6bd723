"""BAGEL in a Python program, with both pipelines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams

from tests.support.bagel_runs import golden
from tests.support.bagel_runs import picture as noise
from tests.support.bagel_serving import (
    CASES,
    REPLIES,
    alone,
    assert_golden,
    assert_same,
    expected_reply,
    fields_of,
    messages,
    picture_of,
    text_of,
)
from vllm_omni_ext.errors import RequestError
from vllm_omni_ext.model_plugins.bagel.model import Bagel

pytestmark = pytest.mark.engine

CLOSE = 1e-4
PROMPT = "a red cat"
SMALL: dict[str, Any] = {"size": "48x32", "num_timesteps": 5, "seed": 1}


@pytest.fixture(scope="module", params=["bagel", pytest.param("bagel_single", marks=pytest.mark.extended)])
def llm(request: pytest.FixtureRequest, bagel: Path) -> Iterator[Any]:
    from vllm import LLM

    options = {
        "stage_config": request.param,
        "stage_overrides": {"dit": {"cpu_threads": 1}},  # a fork of a process that has computed cannot start threads
    }
    with LLM(str(bagel), omni=True, max_model_len=1024, **options) as made:
        yield made


@pytest.mark.parametrize("name", CASES)
def test_pictures_and_latents_equal_the_reference(llm: Any, name: str) -> None:
    run = golden(name)
    fields, shown = fields_of(run), picture_of(run)
    top = {key: fields.pop(key) for key in ("seed", "height", "width") if key in fields}
    prompt = {"prompt": text_of(run), **({"image": shown} if shown else {})}
    [made] = llm.generate(prompt, {"dit": fields}, modalities=["image"], return_latents=True, use_tqdm=False, **top)
    assert made.error is None
    assert np.abs(made.latents[0] - run.tensors["latent"].numpy()).max() < CLOSE
    assert_golden(np.asarray(made.images[0]), name)
    assert made.think_text is None
    assert made.outputs_by_modality["image"][-1].seed == 42


@pytest.mark.extended
def test_replies_equal_the_reference(llm: Any) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=23)
    prompts = [messages(golden(name).parts) for name in REPLIES]
    replies = llm.chat(prompts, greedy, modalities=["text"], use_tqdm=False)
    assert [list(reply.outputs[0].token_ids) for reply in replies] == [expected_reply(name) for name in REPLIES]
    assert [(reply.images, reply.think_text) for reply in replies] == [((), None)] * len(REPLIES)


@pytest.mark.extended
def test_a_thought_and_its_picture_equal_the_model(llm: Any, bagel_model: Bagel) -> None:
    given = {"num_timesteps": 5, "seed": 1, "max_think_token_n": 16}
    expected, thought = alone(bagel_model, [PROMPT], height=32, width=48, think=True, **given)
    [made] = llm.generate(PROMPT, modalities=["image"], think=True, size="48x32", use_tqdm=False, **given)
    assert made.think_text == thought
    assert_same(np.asarray(made.images[0]), expected)
    [both] = llm.generate(PROMPT, modalities=["text", "image"], size="48x32", use_tqdm=False, **given)
    assert both.outputs[0].text == thought
    assert_same(np.asarray(both.images[0]), expected)


@pytest.mark.extended
def test_a_thought_about_a_picture_equals_the_model_or_is_refused(llm: Any, bagel_model: Bagel) -> None:
    shown = noise(60, 80, 1)
    given = {"num_timesteps": 5, "seed": 1, "think": True, "max_think_token_n": 16}
    [made] = llm.generate({"prompt": "blue", "image": shown}, modalities=["image"], use_tqdm=False, **given)
    if llm.plan.pipeline == "bagel":
        assert isinstance(made.error, RequestError) and made.error.parameter == "think"
        return
    expected, thought = alone(bagel_model, [shown, "blue"], **given)
    assert made.think_text == thought
    assert_same(np.asarray(made.images[0]), expected)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"sampling_params": {"dit": {"cfg_interval": [1.0]}}}, "dit.cfg_interval"),
        ({"sampling_params": {"dit": 4}}, "dit"),
        ({"size": "17x17"}, "size"),
        ({"modalities": ["audio"]}, "modalities"),
    ],
)
def test_the_error_of_a_wrong_value_names_it(llm: Any, given: dict[str, Any], name: str) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate(PROMPT, **{"modalities": ["image"], "use_tqdm": False, **given})
    assert caught.value.parameter == name


def test_a_wrong_prompt_fails_alone(llm: Any) -> None:
    wrong, right = llm.generate(["<|im_start|><|im_end|>", PROMPT], modalities=["image"], use_tqdm=False, **SMALL)
    assert isinstance(wrong.error, RequestError) and wrong.error.parameter == "prompt"
    assert wrong.think_text is None and wrong.images == ()
    assert right.error is None and right.images
