"""BAGEL's two stages behind HTTP: two replicas of each, two API servers."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from examples.server import Server
from tests.families.serving import chat, client, during, events, picture, pixels, settled
from tests.support import readme
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
    expected_reply,
    fields_of,
    image_part,
    made,
    png,
    reply,
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
SOON_S = 60.0
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


def test_the_curl_example_of_the_readme(server: Server) -> None:
    (words,) = (each for each in readme.commands("curl") if "images" in each[1])
    there = [readme.at(server.port, word) for word in words]
    done = subprocess.run([*there, "--fail"], check=True, timeout=ANSWER_S, capture_output=True)
    (image,) = json.loads(done.stdout)["data"]
    assert pixels(image["b64_json"]).ndim == 3


def through_a_chat(server: Server, name: str) -> dict[str, Any]:
    run = golden(name)
    return chat(server, chat_body(run.parts, "image", **fields_of(run)))


@pytest.mark.parametrize("name", CASES)
def test_pictures_and_edits_through_chats_equal_the_reference(server: Server, name: str) -> None:
    answer = through_a_chat(server, name)
    assert_golden(picture(answer), name)
    message = answer["choices"][0]["message"]
    assert message["content"] is None
    assert message["images"][0]["seed"] == 42


@pytest.mark.parametrize("name", REPLIES)
def test_replies_equal_the_reference(server: Server, name: str) -> None:
    assert reply(server, name) == expected_reply(name)


def test_five_pictures_at_once_equal_the_reference(server: Server) -> None:
    """Through the APIs of pictures and edits; two more, without references, equal those made alone."""
    others = [
        lambda: made(server, PROMPT, **{**SMALL, "num_timesteps": 20, "cfg_renorm_type": "channel"}),
        lambda: edited(server, "blue", noise(70, 50, 3), num_timesteps=12, seed=9, cfg_img_scale=1.0),
    ]
    single = [ask() for ask in others]
    with ThreadPoolExecutor(len(CASES) + len(others)) as threads:
        pictures = {name: threads.submit(ask_for, server, name) for name in CASES}
        together = [threads.submit(ask) for ask in others]
    for name, each in pictures.items():
        assert_golden(each.result(), name)
    for one, other in zip(single, together, strict=True):
        assert_same(one, other.result())


def test_several_pictures_have_consecutive_seeds(server: Server) -> None:
    answer = client(server).images.generate(
        model=MODEL, prompt=PROMPT, n=2, size="48x32", extra_body={"num_timesteps": 5, "seed": 1}
    )  # type: ignore[call-overload]
    assert [entry.seed for entry in answer.data] == [1, 2]
    np.testing.assert_array_equal(pixels(answer.data[0].b64_json), made(server, PROMPT, **SMALL))


def test_progress_and_previews_are_streamed(server: Server) -> None:
    found = events(server, "chat/completions", chat_body([PROMPT], "image", stream=True, previews=1, **SMALL))
    progress = [event["progress"] for event in found if "progress" in event]
    assert progress == [{"stage": "dit", "done": done, "total": 4} for done in (1, 2, 3, 4)]
    images = [each for event in found for choice in event["choices"] for each in choice["delta"].get("images", ())]
    assert [image.get("partial", False) for image in images] == [True, False]
    np.testing.assert_array_equal(pixels(images[-1]["image_url"]["url"]), made(server, PROMPT, **SMALL))


def test_a_text_between_two_pictures_keeps_its_place(server: Server, bagel_model: Bagel) -> None:
    parts = [noise(60, 80, 1), "and", noise(50, 70, 2), "together"]
    expected, _ = alone(bagel_model, parts, num_timesteps=5, seed=4)
    assert_same(picture(chat(server, chat_body(parts, "image", num_timesteps=5, seed=4))), expected)


def test_an_uploaded_picture_in_the_cache_gives_the_same_answer(server: Server) -> None:
    parts = [noise(60, 80, 7), "blue"]
    first, second = (picture(chat(server, chat_body(parts, "image", num_timesteps=4, seed=4))) for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_a_thought_and_its_picture_equal_the_model(server: Server, bagel_model: Bagel) -> None:
    expected, thought = alone(bagel_model, [PROMPT], height=32, width=48, num_timesteps=5, seed=1, **THOUGHT)
    answer = chat(server, chat_body([PROMPT], "image", **SMALL, **THOUGHT))
    message = answer["choices"][0]["message"]
    assert (message["content"], message["reasoning"]) == (None, thought)
    assert 0 < answer["usage"]["completion_tokens_details"]["reasoning_tokens"] < 16
    assert_same(picture(answer), expected)
    assert_same(made(server, PROMPT, **SMALL, **THOUGHT), expected)


def test_a_thought_as_text_with_its_picture_equals_the_model(server: Server, bagel_model: Bagel) -> None:
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


@pytest.mark.parametrize(
    ("path", "fields", "name"),
    [
        ("images/generations", {"size": "512x16"}, "size"),
        ("images/generations", {"num_timesteps": 2000}, "num_timesteps"),
        ("images/generations", {"seed": -1}, "body.seed"),
        ("images/generations", {"prompt": "x y " * 1000}, "prompt"),
        ("images/generations", {"negative_prompt": "ugly"}, "negative_prompt"),
        ("images/generations", {"return_latents": True}, "return_latents"),
        ("images/generations", {"dit": {"cfg_interval": [1.0, 0.0]}}, "dit.cfg_interval"),
        ("images/edits", {"file": b"no picture"}, "image"),
        ("images/edits", {"size": "16x16"}, "size"),
        ("images/edits", {"think": "true"}, "think"),
        ("chat/completions", {"modalities": ["image"], "image": {"size": "50x50"}}, "image.size"),
        ("chat/completions", {"modalities": ["image"], "previews": 2}, "previews"),
        ("chat/completions", {"modalities": ["text"], "think": True}, "think"),
        ("chat/completions", {"modalities": ["audio"]}, "modalities"),
    ],
)
def test_a_wrong_request_is_refused(server: Server, path: str, fields: dict[str, Any], name: str) -> None:
    body = {"model": MODEL, "prompt": PROMPT, **fields}
    form: dict[str, Any] = {"json": body}
    if path == "images/edits":
        form = {"files": {"image": body.pop("file", png(noise(64, 80, 1)))}, "data": body}
    elif path == "chat/completions":
        form = {"json": {**chat_body([PROMPT]), **fields}}
    answer = httpx.post(f"{server.base_url}/{path}", timeout=ANSWER_S, **form)
    assert answer.status_code == 400, answer.text[:500]
    assert answer.json()["error"]["param"] == name, answer.text[:500]


def test_a_picture_stays_the_same_when_its_replica_dies(server: Server) -> None:
    calm = made(server, PROMPT, **LONG)
    again = during(server, "dit", lambda: made(server, PROMPT, **LONG), partial(kill, server))
    np.testing.assert_array_equal(again, calm)
    assert until(lambda: all_up(server, REPLICAS), 120)


def test_a_thought_stays_the_same_when_its_replica_dies(server: Server) -> None:
    body = chat_body([PROMPT], "image", **SMALL, think=True, max_think_token_n=600)
    calm = chat(server, body)
    again = during(server, "ar", lambda: chat(server, body), partial(kill, server))
    thoughts = [answer["choices"][0]["message"]["reasoning"] for answer in (again, calm)]
    assert thoughts[0] == thoughts[1]
    np.testing.assert_array_equal(picture(again), picture(calm))
    assert until(lambda: all_up(server, REPLICAS), 120)


def test_a_picture_of_a_client_that_disconnects_is_not_finished(server: Server) -> None:
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
    counts = [line for line in text.splitlines() if line.startswith(PREFIX + "stage_part_seconds_count")]
    for part in ("queue", "prefill", "steps", "vae"):
        assert any(f'part="{part}"' in line for line in counts), part


def _health(server: Server) -> dict[str, str]:
    return json.loads(get(server, "/health")[1])["requests"]


def test_pictures_are_drawn_while_the_text_stage_is_down(server: Server) -> None:
    with stopped(server, "ar"):
        assert until(lambda: get(server, "/health")[0] == 503)
        assert _health(server) == {"text": "DOWN", "image": "UP", "think": "DOWN", "edit": "UP"}
        assert_golden(ask_for(server, "edit_fp32"), "edit_fp32")
        assert_golden(picture(through_a_chat(server, "t2i_fp32")), "t2i_fp32")


def test_text_is_written_while_the_picture_stage_is_down(server: Server) -> None:
    with stopped(server, "dit"):
        assert reply(server, "understand_fp32") == expected_reply("understand_fp32")
        assert until(lambda: get(server, "/health")[0] == 503)
        assert _health(server) == {"text": "UP", "image": "DOWN", "think": "DOWN", "edit": "DOWN"}


def test_a_picture_in_an_earlier_answer_is_part_of_the_prompt(server: Server, bagel_model: Bagel) -> None:
    first = chat(server, chat_body([PROMPT], "image", **SMALL))
    drawn = Image.fromarray(picture(first))
    body = chat_body([PROMPT], "image", num_timesteps=4, seed=2)
    body["messages"] += [{"role": "assistant", "content": [image_part(drawn)]}, {"role": "user", "content": "now blue"}]
    expected, _ = alone(bagel_model, [PROMPT, drawn, "now blue"], num_timesteps=4, seed=2)
    assert_same(picture(chat(server, body)), expected)
