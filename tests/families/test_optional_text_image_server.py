"""A language model that a request may leave out, and a painter with a scheduler and a worker of its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from examples.server import Server
from tests.families.oracles import continued, painted, tokens_of
from tests.families.serving import chat, chat_body, client, during, events, picture, pixels, served, settled
from tests.support.cluster import MODEL, all_up, get, kill, overrides, stopped, until

pytestmark = pytest.mark.engine

TEXT = "a blue boat"
SIZE, SIDES = "16x12", (16, 12)
TOKENS = 8
LONG = 3000
THINKING = {"max_completion_tokens": TOKENS, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("optional_text_image")


@pytest.fixture(scope="module")
def prompt(folder: Path) -> list[int]:
    return tokens_of(folder, TEXT)


@pytest.fixture(scope="module")
def text(folder: Path, prompt: list[int]) -> list[int]:
    return continued(folder, prompt, TOKENS)


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("optional_text_image") / "log"
    with served(folder, log, 3, *overrides(painter={"replicas": 2})) as server:
        yield server


@pytest.fixture(autouse=True)
def nothing_is_held(server: Server) -> Iterator[None]:
    yield
    assert settled(server)


@pytest.mark.parametrize("default", [False, True])
def test_text_alone_is_answered_also_by_default(server: Server, text: list[int], default: bool) -> None:
    body = chat_body(TEXT, "text", **THINKING)
    if default:
        del body["modalities"]
    answer = chat(server, body)
    assert answer["choices"][0]["token_ids"] == text
    assert "images" not in answer["choices"][0]["message"]


def test_a_picture_of_the_prompt(server: Server, folder: Path, prompt: list[int]) -> None:
    answer = chat(server, chat_body(TEXT, "image", size=SIZE, seed=1))
    np.testing.assert_array_equal(picture(answer), painted(folder, prompt, SIDES, 1))


def test_a_picture_through_the_api_of_pictures(server: Server, folder: Path, prompt: list[int]) -> None:
    made = client(server).images.generate(model=MODEL, prompt=TEXT, size=SIZE, extra_body={"seed": 2})  # type: ignore[call-overload]
    np.testing.assert_array_equal(pixels(made.data[0].b64_json), painted(folder, prompt, SIDES, 2))


def test_text_and_a_picture_of_both(server: Server, folder: Path, prompt: list[int], text: list[int]) -> None:
    parameters = {"steps": 5, "contrast": 0.5}
    answer = chat(server, chat_body(TEXT, "text", "image", size=SIZE, seed=3, painter=parameters, **THINKING))
    assert answer["choices"][0]["token_ids"] == text
    np.testing.assert_array_equal(picture(answer), painted(folder, [*prompt, *text], SIDES, 3, 5, 0.5))


def test_thinking_first_without_the_text(server: Server, folder: Path, prompt: list[int], text: list[int]) -> None:
    answer = chat(server, chat_body(TEXT, "image", size=SIZE, seed=4, think=True, **THINKING))
    np.testing.assert_array_equal(picture(answer), painted(folder, [*prompt, *text], SIDES, 4))
    assert not answer["choices"][0]["message"]["content"]


def test_text_and_a_picture_are_streamed(server: Server, folder: Path, prompt: list[int], text: list[int]) -> None:
    body = chat_body(TEXT, "text", "image", size=SIZE, seed=5, stream=True, **THINKING)
    found = events(server, "chat/completions", body)
    choices = [choice for event in found for choice in event["choices"]]
    assert [token for choice in choices for token in choice.get("token_ids") or ()] == text
    assert [event["progress"]["done"] for event in found if "progress" in event] == [1, 2]
    (image,) = (image for choice in choices for image in choice["delta"].get("images", ()))
    expected = painted(folder, [*prompt, *text], SIDES, 5)
    np.testing.assert_array_equal(pixels(image["image_url"]["url"]), expected)


@pytest.mark.parametrize("leave_after", [0, 4, TOKENS + 5])
def test_a_client_that_leaves_ends_its_request(server: Server, leave_after: int) -> None:
    parameters = {"steps": LONG}
    body = chat_body(TEXT, "text", "image", size=SIZE, stream=True, painter=parameters, **THINKING)
    events(server, "chat/completions", body, leave_after)
    assert settled(server)


def test_a_request_survives_the_death_of_its_painter(server: Server, folder: Path, prompt: list[int]) -> None:
    body = chat_body(TEXT, "image", size=SIZE, seed=6, painter={"steps": LONG})
    answer = during(server, "painter", lambda: chat(server, body), lambda name: kill(server, name) and None)
    np.testing.assert_array_equal(picture(answer), painted(folder, prompt, SIDES, 6, LONG))
    assert until(lambda: all_up(server, 3), 120)


@pytest.mark.extended
def test_pictures_without_the_language_model(server: Server, folder: Path, prompt: list[int]) -> None:
    with stopped(server, "ar"):
        assert until(lambda: get(server, "/health")[0] == 503)
        requests = json.loads(get(server, "/health")[1])["requests"]
        assert requests == {"text": "DOWN", "image": "UP", "think": "DOWN"}
        answer = chat(server, chat_body(TEXT, "image", size=SIZE, seed=7))
        np.testing.assert_array_equal(picture(answer), painted(folder, prompt, SIDES, 7))


def test_text_without_the_painter(server: Server, text: list[int]) -> None:
    with stopped(server, "painter"):
        assert chat(server, chat_body(TEXT, "text", **THINKING))["choices"][0]["token_ids"] == text


@pytest.mark.parametrize(
    ("fields", "path"), [({"painter": {"contrast": 11.0}}, "painter.contrast"), ({"size": "9999x9999"}, "size")]
)
def test_wrong_fields_are_refused_by_their_path(server: Server, fields: dict[str, Any], path: str) -> None:
    answer = httpx.post(f"{server.base_url}/chat/completions", json=chat_body(TEXT, "image", **fields), timeout=60)
    assert answer.status_code == 400 and path in answer.text
