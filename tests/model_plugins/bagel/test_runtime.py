"""The stages of a request, their parameters, and requests that are refused before any stage gets them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image

from tests.support.bagel_runs import picture
from vllm_omni_ext.errors import RequestError, RequestFailed
from vllm_omni_ext.model_plugins.bagel.images import resize
from vllm_omni_ext.model_plugins.bagel.model import Bagel
from vllm_omni_ext.model_plugins.bagel.parameters import image_parameters
from vllm_omni_ext.model_plugins.bagel.prompts import THINK_THEN_DRAW
from vllm_omni_ext.model_plugins.bagel.requests.flow import DrawFlow, ThinkFlow
from vllm_omni_ext.model_plugins.bagel.requests.parts import picture_part, split_prompt, text_ids
from vllm_omni_ext.model_plugins.bagel.requests.payloads import DitParams, Draw, Drawn, Picture, Text, last_size
from vllm_omni_ext.model_plugins.bagel.requests.runtime import BagelRuntime
from vllm_omni_ext.plugins.flow import ForwardFlow, Open, Submit
from vllm_omni_ext.plugins.runtime import Planned, Rendered, RequestOptions, RuntimeContext
from vllm_omni_ext.serving.options import RequestFields

PIPELINES = {"bagel": "ar", "bagel_single": "dit"}


@pytest.fixture(params=PIPELINES)
def runtime(request: pytest.FixtureRequest, checkpoint: Path) -> BagelRuntime:
    return made(checkpoint, request.param)


@pytest.fixture
def two(checkpoint: Path) -> BagelRuntime:
    return made(checkpoint, "bagel")


@pytest.fixture
def one(checkpoint: Path) -> BagelRuntime:
    return made(checkpoint, "bagel_single")


def made(checkpoint: Path, pipeline: str, **defaults: Any) -> BagelRuntime:
    context = RuntimeContext(
        hf_config=None,
        pipeline=pipeline,
        frontend=PIPELINES[pipeline],
        limits={"ar": 1024, "dit": 1024},
        defaults={"dit": defaults},
        model_config=SimpleNamespace(model=str(checkpoint), revision=None),
    )
    return BagelRuntime(context)


def options(*modalities: str, dit: DitParams | None = None, **fields: Any) -> RequestOptions:
    values, _ = RequestFields(BagelRuntime.fields).read(fields)
    return RequestOptions(modalities=modalities, params={} if dit is None else {"dit": dit}, fields=values)


def planned(runtime: BagelRuntime, given: RequestOptions, pictures: int = 0, text: str = "a fox") -> Planned:
    runtime.validate(given)
    ids = runtime.tokens.text(text)[1:-1]
    parts = runtime.parts([picture(64, 96, seed) for seed in range(pictures)], ids)
    return runtime.plan(Rendered(data=parts), given)


def drawn(plan: Planned) -> Draw:
    [action] = plan.flow.begin()
    assert isinstance(action, Submit) and isinstance(action.payload, Draw)
    return action.payload


def refusal(runtime: BagelRuntime, given: RequestOptions, pictures: int = 0, text: str = "a fox") -> RequestError:
    with pytest.raises(RequestError) as caught:
        planned(runtime, given, pictures, text)
    return caught.value


def test_stages_of_each_kind_of_request(two: BagelRuntime, one: BagelRuntime) -> None:
    think = {"ar", "dit"}
    assert two.capabilities().routes == {"text": {"ar"}, "image": {"dit"}, "think": think, "edit": {"dit"}}
    assert set(one.capabilities().routes.values()) == {frozenset({"dit"})}
    assert two.capabilities().default_modalities == ("text",)


def test_text_is_forwarded_to_the_frontend(runtime: BagelRuntime) -> None:
    plan = planned(runtime, options("text", seed=1, size="auto"))
    assert isinstance(plan.flow, ForwardFlow)
    assert plan.flow.stages == runtime.capabilities().routes["text"]


def test_a_picture_of_a_text_has_the_parameters_of_the_request(runtime: BagelRuntime) -> None:
    plan = planned(runtime, options("image", size="96x64", num_inference_steps=7, seed=42, previews=2))
    assert isinstance(plan.flow, DrawFlow) and plan.flow.stages == {"dit"}
    draw = drawn(plan)
    assert draw.parts == [Text(list(runtime.tokens.text("a fox")))]
    expected = asdict(image_parameters({"height": 64, "width": 96, "num_timesteps": 8, "seed": 42}, edit=False))
    assert msgspec.structs.asdict(draw.parameters) == expected
    assert (draw.previews, draw.latent, draw.thought) == (2, False, None)


def test_a_seed_that_is_not_given_is_random_and_known(runtime: BagelRuntime) -> None:
    one, other = (drawn(planned(runtime, options("image"))).parameters.seed for _ in range(2))
    assert one is not None and other is not None and one != other


def test_an_edit_has_pictures_and_their_size(runtime: BagelRuntime) -> None:
    draw = drawn(planned(runtime, options("image", return_latents=True), pictures=2))
    assert [type(part) for part in draw.parts] == [Picture, Picture, Text]
    assert (draw.parameters.cfg_img_scale, draw.parameters.cfg_renorm_type) == (2.0, "text_channel")
    size = runtime.parts([picture(64, 96, 0)], [])[0]
    assert isinstance(size, Picture)
    assert (draw.parameters.height, draw.parameters.width) == (size.height, size.width)
    assert draw.latent
    assert refusal(runtime, options("image", size="16x16"), pictures=1).parameter == "size"


def test_parameters_of_the_stage_config_are_used(checkpoint: Path) -> None:
    runtime = made(checkpoint, "bagel", num_timesteps=3, height=32)
    parameters = drawn(planned(runtime, options("image"))).parameters
    assert (parameters.num_timesteps, parameters.height) == (3, 32)
    assert drawn(planned(runtime, options("image"), pictures=1)).parameters.height != 32


def test_a_rendered_prompt_is_split(two: BagelRuntime) -> None:
    text = list(two.tokens.text("blue"))
    plan = two.plan(Rendered(prompt=[0, 0, *text, two.tokens.start], features=[feature_at(0)]), options("image"))
    assert drawn(plan).parts == [PIECE, Text(text)]


@pytest.mark.parametrize("modalities", [("image",), ("image", "thought"), ("text", "image")])
def test_ar_writes_the_thought_of_a_text(two: BagelRuntime, modalities: tuple[str, ...]) -> None:
    given = options(*modalities, max_think_token_n=21, **({"think": True} if "text" not in modalities else {}))
    plan = planned(two, given)
    assert isinstance(plan.flow, ThinkFlow) and plan.flow.stages == {"ar", "dit"}
    assert plan.flow.outputs == {*modalities} - {"thought"}
    [opened] = plan.flow.begin()
    assert isinstance(opened, Open)
    assert opened.prompt == [*two.tokens.text(THINK_THEN_DRAW), *two.tokens.text("a fox"), two.tokens.start]
    assert (opened.params.max_tokens, opened.params.temperature) == (20, 0.0)
    assert opened.stop == (two.tokens.end,)


def test_dit_writes_the_thought_of_the_single_stage(one: BagelRuntime) -> None:
    for pictures in (0, 1):
        plan = planned(one, options("text", "image"), pictures)
        assert isinstance(plan.flow, DrawFlow) and plan.flow.outputs == {"text", "image"}
        assert drawn(plan).parameters.think is True
        assert drawn(plan).thought is None


def test_a_thought_is_limited_by_the_context_of_ar(two: BagelRuntime) -> None:
    [opened] = planned(two, options("image", think=True)).flow.begin()
    assert isinstance(opened, Open) and opened.params.max_tokens == 1024 - len(opened.prompt)
    assert refusal(two, options("image", think=True, max_think_token_n=1024)).parameter == "max_think_token_n"
    assert refusal(two, options("image", think=True), text="x y " * 300).parameter == "prompt"
    plan = planned(two, options("image", think=True, max_think_token_n=1))
    assert plan.flow.stages == {"dit"} and drawn(plan).thought == [], "the start alone needs no language model"


def test_only_the_single_stage_thinks_about_pictures(two: BagelRuntime) -> None:
    error = refusal(two, options("image", think=True), pictures=1)
    assert error.parameter == "think" and "bagel_single" in str(error)
    assert refusal(two, options("image", dit=DitParams(think=True)), pictures=1).parameter == "dit.think"
    assert refusal(two, options("text", "image"), pictures=1).parameter == "think"


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (options("image", size="64x4096"), "size"),
        (options("image", height=0), "height"),
        (options("image", dit=DitParams(height=100)), "dit.height"),
        (options("image", num_timesteps=1), "num_timesteps"),
        (options("text", "image", think=False), "think"),
        (options("text", think=True), "think"),
        (options("text", size="64x64"), "size"),
        (options("audio"), "modalities"),
    ],
)
def test_refused_before_the_prompt_is_rendered(runtime: BagelRuntime, given: RequestOptions, name: str) -> None:
    with pytest.raises(RequestError) as caught:
        runtime.validate(given)
    assert caught.value.parameter == name


def test_empty_and_too_long_prompts_are_refused(runtime: BagelRuntime) -> None:
    assert refusal(runtime, options("image"), text="").parameter == "prompt"
    assert refusal(runtime, options("image"), text="x y " * 600).parameter == "prompt"
    planned(runtime, options("image"), pictures=1, text="")


def test_answers_of_dit_are_decoded(two: BagelRuntime) -> None:
    answer = Drawn(height=16, width=16, pixels=bytes(768))
    tensor = torch.from_numpy(np.frombuffer(msgspec.msgpack.encode(answer), np.uint8).copy())
    assert two.decode("dit", tensor) == answer


# -- a rendered prompt becomes texts and pictures -------------------------------------------------------

START, END, PAD = -1, -2, 9
TOKENS: Any = SimpleNamespace(start=START, end=END)
PIXELS = torch.arange(16 * 32 * 3, dtype=torch.uint8).reshape(16, 32, 3)


def feature_at(offset: int, length: int = 2, pixels: torch.Tensor = PIXELS) -> Any:
    where = SimpleNamespace(offset=offset, length=length)
    return SimpleNamespace(mm_position=where, data={"picture": SimpleNamespace(data=pixels)})


PIECE = Picture(16, 32, PIXELS.numpy().tobytes())


@pytest.mark.parametrize(
    ("ids", "at", "parts"),
    [
        ([1, 2], (), [Text([START, 1, 2, END])]),
        ([START, 1, 2, END], (), [Text([START, 1, 2, END])]),
        ([START, 1, END, START], (), [Text([START, 1, END])]),
        ([START, 1, END, START, 2, END], (), [Text([START, 1, END]), Text([START, 2, END])]),
        ([START, END], (), [Text([START, END])]),
        ([START, 1], (), [Text([START, 1, END])]),
        ([PAD, PAD, 1], (0,), [PIECE, Text([START, 1, END])]),
        ([START, 1, PAD, PAD, 2, END, START], (2,), [Text([START, 1, END]), PIECE, Text([START, 2, END])]),
        ([PAD, PAD, PAD, PAD, START, 1, END, START], (2, 0), [PIECE, PIECE, Text([START, 1, END])]),
        ([], (), []),
        ([START], (), []),
    ],
)
def test_texts_and_pictures_of_a_prompt_keep_their_order(ids: list[int], at: tuple[int, ...], parts: list[Any]) -> None:
    found = split_prompt(ids, [feature_at(offset) for offset in at], TOKENS)
    assert found == parts


def test_a_picture_that_is_elsewhere_is_an_error_and_not_another_picture() -> None:
    gone = feature_at(0)
    gone.data = None
    with pytest.raises(RequestFailed):
        split_prompt([PAD, PAD], [gone], TOKENS)


def test_a_picture_is_resized_for_the_autoencoder_with_white_behind_it(model: Bagel) -> None:
    source, rule = picture(60, 84, 1), model.sizes.vae_resize
    part = picture_part(source, rule)
    expected = np.asarray(resize(source, rule))
    assert (part.height, part.width) == expected.shape[:2]
    np.testing.assert_array_equal(np.frombuffer(part.pixels, np.uint8).reshape(expected.shape), expected)
    clear = picture_part(Image.new("RGBA", (64, 64), (0, 0, 0, 0)), rule)
    assert set(clear.pixels) == {255}


def test_the_size_of_a_prompt_is_that_of_its_last_picture() -> None:
    parts = [Text([1]), PIECE, Text([2]), Picture(48, 64, b""), Text([3])]
    assert last_size(parts) == (48, 64)
    assert last_size([Text([1])]) is None
    assert text_ids(parts) == [1, 2, 3]
