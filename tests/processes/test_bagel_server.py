"""BAGEL's two stages behind HTTP: two replicas of each, two API servers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from examples.server import Server
from tests.families.serving import chat, client, during, events, picture, pixels, settled
from tests.support import promql
from tests.support.bagel_runs import golden
from tests.support.bagel_runs import picture as noise
from tests.support.bagel_serving import (
    CASES,
    FLAGS,
    REPLIES,
    alone,
    ask_for,
    assert_golden,
    assert_same,
    chat_body,
    edited,
    fields_of,
    image_part,
    made,
    png,
)
from tests.support.cluster import ANSWER_S, MODEL, all_up, busy, get, idle, kill, overrides, stopped, until
from vllm_omni_ext.metrics import PREFIX
from vllm_omni_ext.model_plugins.bagel.model import Bagel

pytestmark = pytest.mark.engine

PROMPT = "a red cat"
SMALL = {"size": "48x32", "num_timesteps": 5, "seed": 1}
LARGE = {"size": "256x256", "num_timesteps": 1000}
LONG = {"size": "96x64", "num_timesteps": 300, "seed": 3}
THOUGHT = {"think": True, "max_think_token_n": 16}
SOON_S = 10.0
REPLICAS = 4


@pytest.fixture(scope="module")
def server(bagel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("bagel_server") / "log"
    flags = [*FLAGS, "--api-server-count", "2", "--omni-heartbeat-timeout", "3"]
    flags += ["--stage-config", "bagel_replicas", *overrides(ar={"replicas": 2})]
    with Server(bagel, log, flags) as server:
        assert until(lambda: all_up(server, REPLICAS), 120), server.tail()
        yield server


@pytest.fixture(autouse=True)
def nothing_is_held(server: Server) -> Iterator[None]:
    yield
    assert settled(server)


# -- the reference's pictures and replies -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_the_pictures_of_the_reference(server: Server, name: str) -> None:
    assert_golden(ask_for(server, name), name)


@pytest.mark.parametrize("name", CASES)
def test_the_same_through_chats(server: Server, name: str) -> None:
    run = golden(name)
    answer = chat(server, chat_body(run.parts, "image", **fields_of(run)))
    assert_golden(picture(answer), name)
    message = answer["choices"][0]["message"]
    assert message["content"] is None
    assert message["images"][0]["seed"] == 42


@pytest.mark.parametrize("name", REPLIES)
def test_the_replies_of_the_reference(server: Server, name: str) -> None:
    run = golden(name)
    expected = run.info["generated_ids"][0][1:]
    body = chat_body(run.parts, "text", max_completion_tokens=len(expected), return_token_ids=True)
    del body["temperature"]  # greedy is the default
    assert chat(server, body)["choices"][0]["token_ids"] == expected


def test_five_pictures_at_once_are_those_that_each_is_alone(server: Server) -> None:
    asked = [
        *(lambda name=name: ask_for(server, name) for name in CASES),
        lambda: made(server, PROMPT, **{**SMALL, "num_timesteps": 20, "cfg_renorm_type": "channel"}),
        lambda: edited(server, "blue", noise(70, 50, 3), num_timesteps=12, seed=9, cfg_img_scale=1.0),
    ]
    single = [ask() for ask in asked]
    with ThreadPoolExecutor(len(asked)) as threads:
        together = [each.result() for each in [threads.submit(ask) for ask in asked]]
    for one, other in zip(single, together, strict=True):
        assert_same(one, other)


# -- forms of requests and answers ------------------------------------------------------------------------------------


def test_other_names_of_parameters(server: Server) -> None:
    ours = made(server, PROMPT, **SMALL, cfg_text_scale=3.0)
    theirs = made(server, PROMPT, size="48x32", num_inference_steps=4, guidance_scale=3.0, seed=1)
    of_stage = made(server, PROMPT, size="48x32", seed=1, dit={"num_timesteps": 5, "cfg_text_scale": 3.0})
    np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(ours, of_stage)


def test_several_pictures_count_their_seeds_on(server: Server) -> None:
    answer = client(server).images.generate(
        model=MODEL, prompt=PROMPT, n=2, size="48x32", extra_body={"num_timesteps": 5, "seed": 1}
    )  # type: ignore[call-overload]
    assert [entry.seed for entry in answer.data] == [1, 2]
    np.testing.assert_array_equal(pixels(answer.data[0].b64_json), made(server, PROMPT, **SMALL))


def test_a_seed_that_is_not_given_is_told_and_makes_the_picture_again(server: Server) -> None:
    fields = {"size": "48x32", "num_timesteps": 5}
    answer = client(server).images.generate(model=MODEL, prompt=PROMPT, extra_body=fields)
    [entry] = answer.data or ()
    again = made(server, PROMPT, **fields, seed=entry.seed)  # type: ignore[attr-defined]
    np.testing.assert_array_equal(pixels(entry.b64_json or ""), again)


def test_previews_are_streamed(server: Server) -> None:
    stream = client(server).images.generate(
        model=MODEL, prompt=PROMPT, stream=True, partial_images=2, extra_body={**SMALL, "num_timesteps": 9}
    )
    found = list(stream)
    assert [event.type for event in found] == [
        "image_generation.partial_image",
        "image_generation.partial_image",
        "image_generation.completed",
    ]
    np.testing.assert_array_equal(pixels(found[-1].b64_json), made(server, PROMPT, **{**SMALL, "num_timesteps": 9}))
    assert {pixels(event.b64_json).shape for event in found} == {(32, 48, 3)}


def test_a_streamed_chat_tells_its_progress(server: Server) -> None:
    found = events(server, "chat/completions", chat_body([PROMPT], "image", stream=True, previews=1, **SMALL))
    progress = [event["progress"] for event in found if "progress" in event]
    assert progress == [{"stage": "dit", "done": done, "total": 4} for done in (1, 2, 3, 4)]
    images = [each for event in found for choice in event["choices"] for each in choice["delta"].get("images", ())]
    assert [image.get("partial", False) for image in images] == [True, False]
    np.testing.assert_array_equal(pixels(images[-1]["image_url"]["url"]), made(server, PROMPT, **SMALL))


def test_pictures_in_the_content(server: Server) -> None:
    answer = chat(server, chat_body([PROMPT], "image", image_in_content=True, **SMALL))
    [part] = answer["choices"][0]["message"]["content"]
    assert part["type"] == "image_url"
    np.testing.assert_array_equal(pixels(part["image_url"]["url"]), made(server, PROMPT, **SMALL))


def test_a_text_between_two_pictures(server: Server, bagel_model: Bagel) -> None:
    parts = [noise(60, 80, 1), "and", noise(50, 70, 2), "together"]
    expected, _ = alone(bagel_model, parts, num_timesteps=5, seed=4)
    assert_same(picture(chat(server, chat_body(parts, "image", num_timesteps=5, seed=4))), expected)


def test_the_same_picture_again_is_not_lost_in_a_cache(server: Server) -> None:
    parts = [noise(60, 80, 7), "blue"]
    first, second = (picture(chat(server, chat_body(parts, "image", num_timesteps=4, seed=4))) for _ in range(2))
    np.testing.assert_array_equal(first, second)


# -- thinking ---------------------------------------------------------------------------------------------------------


def test_a_thought_and_its_picture(server: Server, bagel_model: Bagel) -> None:
    expected, thought = alone(bagel_model, [PROMPT], height=32, width=48, num_timesteps=5, seed=1, **THOUGHT)
    answer = chat(server, chat_body([PROMPT], "image", **SMALL, **THOUGHT))
    message = answer["choices"][0]["message"]
    assert (message["content"], message["reasoning"]) == (None, thought)
    assert 0 < answer["usage"]["completion_tokens_details"]["reasoning_tokens"] < 16
    assert_same(picture(answer), expected)
    assert_same(made(server, PROMPT, **SMALL, **THOUGHT), expected)


def test_text_and_picture(server: Server, bagel_model: Bagel) -> None:
    expected, thought = alone(bagel_model, [PROMPT], height=32, width=48, num_timesteps=5, seed=1, **THOUGHT)
    body = chat_body([PROMPT], "text", "image", **SMALL, max_think_token_n=16)
    answer = chat(server, body)
    assert answer["choices"][0]["message"]["content"] == thought
    assert 0 < answer["usage"]["completion_tokens"] < 16
    assert_same(picture(answer), expected)
    found = events(server, "chat/completions", {**body, "stream": True})
    choices = [choice for event in found for choice in event["choices"]]
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == thought
    [image] = [image for choice in choices for image in choice["delta"].get("images", ())]
    assert_same(pixels(image["image_url"]["url"]), expected)


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"size": "50x50"}, "size"),
        ({"size": "512x16"}, "size"),
        ({"size": "large"}, "size"),
        ({"num_inference_steps": 0}, "num_inference_steps"),
        ({"num_timesteps": 2000}, "num_timesteps"),
        ({"seed": -1}, "body.seed"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "x y " * 1000}, "prompt"),
        ({"negative_prompt": "ugly"}, "negative_prompt"),
        ({"quality": "hd"}, "quality"),
        ({"response_format": "url"}, "response_format"),
        ({"return_latents": True}, "return_latents"),
        ({"dit": {"cfg_interval": [1]}}, "dit.cfg_interval"),
        ({"dit": {"cfg_interval": [1.0, 0.0]}}, "dit.cfg_interval"),
        ({"dit": {"steps": 1}}, "dit.steps"),
    ],
)
def test_wrong_requests_for_pictures(server: Server, fields: dict[str, Any], name: str) -> None:
    body = {"model": MODEL, "prompt": PROMPT, **fields}
    refused(httpx.post(f"{server.base_url}/images/generations", json=body, timeout=ANSWER_S), name)


@pytest.mark.parametrize(
    ("file", "fields", "name"),
    [
        (b"no picture", {}, "image"),
        (png(noise(64, 80, 1)), {"size": "16x16"}, "size"),
        (png(noise(64, 80, 1)), {"think": "true"}, "think"),
        (png(noise(64, 80, 1)), {"strength": "0.5"}, "strength"),
    ],
)
def test_wrong_requests_for_edits(server: Server, file: bytes, fields: dict[str, str], name: str) -> None:
    form = {"model": MODEL, "prompt": "blue", **fields}
    refused(httpx.post(f"{server.base_url}/images/edits", data=form, files={"image": file}, timeout=ANSWER_S), name)


@pytest.mark.parametrize(
    ("modalities", "fields", "name"),
    [
        (("image",), {"image": {"size": "50x50"}}, "image.size"),
        (("image",), {"previews": 2}, "previews"),
        (("image",), {"negative_prompt": "ugly"}, "negative_prompt"),
        (("image",), {"n": 2}, "n"),
        (("text", "image"), {"think": False}, "think"),
        (("text",), {"think": True}, "think"),
        (("audio",), {}, "modalities"),
    ],
)
def test_wrong_chats(server: Server, modalities: tuple[str, ...], fields: dict[str, Any], name: str) -> None:
    body = chat_body([PROMPT], *modalities, **fields)
    refused(httpx.post(f"{server.base_url}/chat/completions", json=body, timeout=ANSWER_S), name)


def test_a_thought_about_a_picture_needs_the_other_pipeline(server: Server) -> None:
    for given in ({"think": True}, {"dit": {"think": True}}):
        body = chat_body([noise(64, 80, 1), "blue"], "image", **given)
        answer = httpx.post(f"{server.base_url}/chat/completions", json=body, timeout=ANSWER_S)
        refused(answer, "think" if "think" in given else "dit.think")
        assert "bagel_single" in answer.text


def refused(answer: httpx.Response, name: str) -> None:
    assert answer.status_code == 400, answer.text[:500]
    assert answer.json()["error"]["param"] == name, answer.text[:500]


# -- replicas and clients ---------------------------------------------------------------------------------------------


def test_a_replica_dies_while_it_draws(server: Server) -> None:
    calm = made(server, PROMPT, **LONG)
    again = during(server, "dit", lambda: made(server, PROMPT, **LONG), lambda name: kill(server, name) and None)
    np.testing.assert_array_equal(again, calm)
    assert until(lambda: all_up(server, REPLICAS), 120)


def test_a_replica_dies_while_it_thinks(server: Server) -> None:
    body = chat_body([PROMPT], "image", **SMALL, think=True, max_think_token_n=600)
    calm = chat(server, body)
    again = during(server, "ar", lambda: chat(server, body), lambda name: kill(server, name) and None)
    assert _thought(again) == _thought(calm)
    np.testing.assert_array_equal(picture(again), picture(calm))
    assert until(lambda: all_up(server, REPLICAS), 120)


def _thought(answer: dict[str, Any]) -> str:
    thought: str = answer["choices"][0]["message"]["reasoning"]
    return thought


def test_a_client_leaves_while_its_picture_is_drawn(server: Server) -> None:
    before = _steps(server)
    events(server, "chat/completions", chat_body([PROMPT], "image", stream=True, **LARGE), 5)
    assert until(lambda: idle(server), SOON_S)
    assert 3 <= _steps(server) - before < 500
    assert busy(server, "dit") == ""


def _steps(server: Server) -> float:
    text = get(server, "/metrics")[1].decode()
    lines = [line for line in text.splitlines() if line.startswith(PREFIX + "stage_steps_total{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if 'stage="dit"' in line)


def test_the_time_of_each_part_of_the_work_is_measured(server: Server) -> None:
    made(server, PROMPT, **SMALL)
    text = get(server, "/metrics")[1].decode()
    for part in ("queue", "prefill", "steps", "vae"):
        assert [
            line
            for line in text.splitlines()
            if line.startswith(PREFIX + "stage_part_seconds_count") and f'part="{part}"' in line
        ], part
    promql.check(text, ("Pictures",))


def _health(server: Server) -> dict[str, str]:
    found: dict[str, str] = json.loads(get(server, "/health")[1])["requests"]
    return found


def test_pictures_without_the_language_model(server: Server) -> None:
    with stopped(server, "ar"):
        assert until(lambda: get(server, "/health")[0] == 503)
        assert _health(server) == {"text": "DOWN", "image": "UP", "think": "DOWN", "edit": "UP"}
        for name in CASES:
            assert_golden(ask_for(server, name), name)
        assert_golden(
            picture(chat(server, chat_body(golden("t2i_fp32").parts, "image", **fields_of(golden("t2i_fp32"))))),
            "t2i_fp32",
        )


def test_text_without_the_stage_of_pictures(server: Server) -> None:
    run = golden("understand_fp32")
    with stopped(server, "dit"):
        body = chat_body(run.parts, "text", max_completion_tokens=23, return_token_ids=True)
        assert chat(server, body)["choices"][0]["token_ids"] == run.info["generated_ids"][0][1:]
        assert until(lambda: get(server, "/health")[0] == 503)
        assert _health(server) == {"text": "UP", "image": "DOWN", "think": "DOWN", "edit": "DOWN"}


def test_a_conversation_with_a_picture_of_its_own(server: Server, bagel_model: Bagel) -> None:
    first = chat(server, chat_body([PROMPT], "image", **SMALL))
    drawn = Image.fromarray(picture(first))
    body = chat_body([PROMPT], "image", num_timesteps=4, seed=2)
    body["messages"] += [
        {"role": "assistant", "content": [image_part(drawn)]},
        {"role": "user", "content": "now blue"},
    ]
    expected, _ = alone(bagel_model, [PROMPT, drawn, "now blue"], num_timesteps=4, seed=2)
    assert_same(picture(chat(server, body)), expected)
