"""A pipeline without any text, as a server: two replicas, two API servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest

from examples.server import Server
from tests.families.oracles import denoised
from tests.families.serving import chat, chat_body, client, during, events, picture, pixels, served, settled
from tests.support.cluster import MODEL, all_up, get, kill, overrides, status, until

pytestmark = pytest.mark.engine

TEXT = "a red house by the sea"
SIZE, SIDES = "32x24", (32, 24)
LONG = 3000
"""Steps of a request that something is to happen to."""


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("onestage_image")


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("onestage_image") / "log"
    with served(folder, log, 2, "--api-server-count", "2", *overrides(denoiser={"replicas": 2})) as server:
        yield server


@pytest.fixture(autouse=True)
def nothing_is_held(server: Server) -> Iterator[None]:
    yield
    assert settled(server)


def test_health_and_card(server: Server) -> None:
    assert get(server, "/health")[0] == 200
    assert client(server).models.list().data[0].id == MODEL
    assert [stage["name"] for stage in status(server)["stages"]] == ["denoiser"]


def test_pictures_through_the_api_of_pictures(server: Server, folder: Path) -> None:
    made = client(server).images.generate(model=MODEL, prompt=TEXT, size=SIZE, n=2, extra_body={"seed": 5})  # type: ignore[call-overload]
    assert [image.b64_json is not None for image in made.data] == [True, True]
    for index, image in enumerate(made.data):
        np.testing.assert_array_equal(pixels(image.b64_json), denoised(folder, TEXT, SIDES, 5 + index)[-1])


def test_parameters_of_the_stage(server: Server, folder: Path) -> None:
    body = {"model": MODEL, "prompt": TEXT, "size": SIZE, "seed": 1, "denoiser": {"steps": 9}}
    answer = httpx.post(f"{server.base_url}/images/generations", json=body, timeout=60).json()
    np.testing.assert_array_equal(pixels(answer["data"][0]["b64_json"]), denoised(folder, TEXT, SIDES, 1, 9)[-1])
    body["denoiser"] = {"steps": 0}
    answer = httpx.post(f"{server.base_url}/images/generations", json=body, timeout=60)
    assert answer.status_code == 400 and "denoiser.steps" in answer.text


def test_previews_are_streamed(server: Server, folder: Path) -> None:
    body = {"model": MODEL, "prompt": TEXT, "size": SIZE, "seed": 2, "stream": True, "partial_images": 1}
    found = events(server, "images/generations", body)
    assert [event["type"] for event in found] == ["image_generation.partial_image", "image_generation.completed"]
    steps = denoised(folder, TEXT, SIDES, 2)
    np.testing.assert_array_equal(pixels(found[0]["b64_json"]), steps[1])
    np.testing.assert_array_equal(pixels(found[1]["b64_json"]), steps[3])


def test_chat(server: Server, folder: Path) -> None:
    answer = chat(server, chat_body(TEXT, "image", size=SIZE, seed=3))
    np.testing.assert_array_equal(picture(answer), denoised(folder, TEXT, SIDES, 3)[-1])
    assert not answer["choices"][0]["message"]["content"]


def test_chat_is_streamed_with_progress(server: Server, folder: Path) -> None:
    found = events(server, "chat/completions", chat_body(TEXT, "image", size=SIZE, seed=4, stream=True))
    assert [event["progress"]["done"] for event in found if "progress" in event] == [1, 2, 3]
    images = [image for event in found for choice in event["choices"] for image in choice["delta"].get("images", ())]
    np.testing.assert_array_equal(pixels(images[0]["image_url"]["url"]), denoised(folder, TEXT, SIDES, 4)[-1])


def test_a_wrong_size_is_one_clear_error(server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="size"):
        client(server).images.generate(model=MODEL, prompt=TEXT, size="9999x9999")  # type: ignore[call-overload]
    answer = httpx.post(f"{server.base_url}/chat/completions", json=chat_body(TEXT, "text"), timeout=60)
    assert answer.status_code == 400 and "modalities" in answer.text


@pytest.mark.parametrize("leave_after", [0, 1, 2, 3, 50])
def test_a_client_that_leaves(server: Server, leave_after: int) -> None:
    body = chat_body(TEXT, "image", size=SIZE, seed=4, stream=True, denoiser={"steps": LONG})
    events(server, "chat/completions", body, leave_after)
    assert settled(server)


def test_a_replica_dies_during_a_request(server: Server, folder: Path) -> None:
    body = chat_body(TEXT, "image", size=SIZE, seed=6, denoiser={"steps": LONG})
    answer = during(server, "denoiser", lambda: chat(server, body), lambda name: kill(server, name) and None)
    np.testing.assert_array_equal(picture(answer), denoised(folder, TEXT, SIDES, 6, LONG)[-1])
    assert until(lambda: all_up(server, 2), 120)
