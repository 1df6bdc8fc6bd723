"""BAGEL as one stage behind HTTP: two replicas that write and draw."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.server import Server
from tests.families.serving import chat, during, events, picture, settled
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
    made,
)
from tests.support.cluster import all_up, kill, overrides, until
from vllm_omni_ext.model_plugins.bagel.model import Bagel

pytestmark = pytest.mark.engine

PROMPT = "a red cat"
LONG = 600


@pytest.fixture(scope="module")
def server(bagel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("bagel_single") / "log"
    flags = [*FLAGS, "--stage-config", "bagel_single", *overrides(dit={"replicas": 2})]
    with Server(bagel, log, flags) as server:
        assert until(lambda: all_up(server, 2), 120), server.tail()
        yield server


@pytest.fixture(autouse=True)
def nothing_is_held(server: Server) -> Iterator[None]:
    yield
    assert settled(server)


@pytest.mark.parametrize("name", CASES)
def test_the_pictures_of_the_reference(server: Server, name: str) -> None:
    assert_golden(ask_for(server, name), name)


def reply(server: Server, name: str) -> list[int]:
    """The tokens of a reply."""
    body = chat_body(golden(name).parts, "text", max_completion_tokens=23, return_token_ids=True)
    del body["temperature"]  # greedy is the default
    tokens: list[int] = chat(server, body)["choices"][0]["token_ids"]
    return tokens


@pytest.mark.parametrize("name", REPLIES)
def test_the_replies_of_the_reference(server: Server, name: str) -> None:
    assert reply(server, name) == golden(name).info["generated_ids"][0][1:]


def test_a_streamed_reply_is_the_text(server: Server) -> None:
    run = golden("understand_fp32")
    found = events(server, "chat/completions", chat_body(run.parts, "text", max_completion_tokens=23, stream=True))
    deltas = [choice["delta"].get("content") or "" for event in found for choice in event["choices"]]
    assert "".join(deltas) == run.info["text"][0]


def test_a_long_reply_comes_in_pieces(server: Server) -> None:
    """The API server joins what it has not sent yet, so that a short reply may come in few pieces, or in one."""
    body = chat_body([PROMPT], "text", max_completion_tokens=LONG, ignore_eos=True)
    found = events(server, "chat/completions", {**body, "stream": True})
    deltas = [choice["delta"].get("content") or "" for event in found for choice in event["choices"]]
    assert "".join(deltas) == chat(server, body)["choices"][0]["message"]["content"]
    assert len([delta for delta in deltas if delta]) > 10


def test_texts_and_pictures_at_once(server: Server) -> None:
    asked: list[Any] = [*(lambda name=name: ask_for(server, name) for name in CASES)]
    with ThreadPoolExecutor(8) as threads:
        pictures = [threads.submit(ask) for ask in asked]
        replies = {name: threads.submit(reply, server, name) for name in REPLIES}
        for name, each in zip(CASES, pictures, strict=True):
            assert_golden(each.result(), name)
        for name, answer in replies.items():
            assert answer.result() == golden(name).info["generated_ids"][0][1:]


def test_a_thought_about_a_text(server: Server, bagel_model: Bagel) -> None:
    given = {"num_timesteps": 5, "seed": 1, "max_think_token_n": 16}
    expected, thought = alone(bagel_model, [PROMPT], height=32, width=48, think=True, **given)
    answer = chat(server, chat_body([PROMPT], "text", "image", size="48x32", **given))
    assert answer["choices"][0]["message"]["content"] == thought
    assert 0 < answer["usage"]["completion_tokens"] < 16
    assert_same(picture(answer), expected)


def test_a_thought_about_a_picture(server: Server, bagel_model: Bagel) -> None:
    shown = noise(60, 80, 1)
    given = {"num_timesteps": 5, "seed": 1, "think": True, "max_think_token_n": 16}
    expected, thought = alone(bagel_model, [shown, "blue"], **given)
    answer = chat(server, chat_body([shown, "blue"], "image", **given))
    assert answer["choices"][0]["message"]["reasoning"] == thought
    assert_same(picture(answer), expected)
    assert_same(edited(server, "blue", shown, **given), expected)


def test_a_replica_dies_while_it_writes(server: Server) -> None:
    body = chat_body([PROMPT], "text", max_completion_tokens=LONG, ignore_eos=True, return_token_ids=True)
    calm = chat(server, body)["choices"][0]["token_ids"]
    again = during(server, "dit", lambda: chat(server, body), lambda name: kill(server, name) and None)
    assert again["choices"][0]["token_ids"] == calm
    assert len(calm) == LONG
    assert until(lambda: all_up(server, 2), 120)


def test_a_replica_dies_while_it_thinks_and_draws(server: Server) -> None:
    given = {"num_timesteps": 200, "seed": 1, "think": True, "max_think_token_n": 200, "size": "96x64"}
    calm = made(server, PROMPT, **given)
    again = during(server, "dit", lambda: made(server, PROMPT, **given), lambda name: kill(server, name) and None)
    np.testing.assert_array_equal(again, calm)
    assert until(lambda: all_up(server, 2), 120)


def test_a_client_leaves_while_it_is_written_to(server: Server) -> None:
    body = chat_body([PROMPT], "text", max_completion_tokens=900, ignore_eos=True, stream=True)
    events(server, "chat/completions", body, 5)
    assert settled(server)
