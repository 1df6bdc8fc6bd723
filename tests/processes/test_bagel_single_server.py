"""BAGEL as one stage behind HTTP: two replicas that write and draw."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from examples.server import Server
from tests.families.serving import chat, during, events, picture, settled
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
    made,
    reply,
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


def test_texts_and_pictures_at_once_equal_the_reference(server: Server) -> None:
    with ThreadPoolExecutor(8) as threads:
        pictures = {name: threads.submit(ask_for, server, name) for name in CASES}
        replies = {name: threads.submit(reply, server, name) for name in REPLIES}
    for name, each in pictures.items():
        assert_golden(each.result(), name)
    assert {name: each.result() for name, each in replies.items()} == {name: expected_reply(name) for name in REPLIES}


def test_a_thought_about_a_picture_equals_the_model(server: Server, bagel_model: Bagel) -> None:
    shown = noise(60, 80, 1)
    given = {"num_timesteps": 5, "seed": 1, "think": True, "max_think_token_n": 16}
    expected, thought = alone(bagel_model, [shown, "blue"], **given)
    answer = chat(server, chat_body([shown, "blue"], "image", **given))
    assert answer["choices"][0]["message"]["reasoning"] == thought
    assert_same(picture(answer), expected)
    assert_same(edited(server, "blue", shown, **given), expected)


@pytest.mark.extended
def test_a_long_reply_is_streamed_in_pieces(server: Server) -> None:
    """The API server joins pieces that wait to be sent: a short reply may have one piece."""
    body = chat_body([PROMPT], "text", max_completion_tokens=LONG, ignore_eos=True)
    found = events(server, "chat/completions", {**body, "stream": True})
    deltas = [choice["delta"].get("content") or "" for event in found for choice in event["choices"]]
    assert "".join(deltas) == chat(server, body)["choices"][0]["message"]["content"]
    assert len([delta for delta in deltas if delta]) > 10


@pytest.mark.extended
def test_a_reply_stays_the_same_when_its_replica_dies(server: Server) -> None:
    body = chat_body([PROMPT], "text", max_completion_tokens=LONG, ignore_eos=True, return_token_ids=True)
    calm = chat(server, body)["choices"][0]["token_ids"]
    again = during(server, "dit", lambda: chat(server, body), partial(kill, server))
    assert again["choices"][0]["token_ids"] == calm
    assert len(calm) == LONG
    assert until(lambda: all_up(server, 2), 120)


@pytest.mark.extended
def test_a_thought_and_its_picture_stay_the_same_when_their_replica_dies(server: Server) -> None:
    given = {"num_timesteps": 200, "seed": 1, "think": True, "max_think_token_n": 200, "size": "96x64"}
    calm = made(server, PROMPT, **given)
    again = during(server, "dit", lambda: made(server, PROMPT, **given), partial(kill, server))
    np.testing.assert_array_equal(again, calm)
    assert until(lambda: all_up(server, 2), 120)


@pytest.mark.extended
def test_nothing_is_held_of_a_reply_whose_client_disconnects(server: Server) -> None:
    body = chat_body([PROMPT], "text", max_completion_tokens=900, ignore_eos=True, stream=True)
    events(server, "chat/completions", body, 5)
