"""A request that ends the process of each replica that runs it fails alone; all others are answered as without it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest

from examples.server import Server
from tests.support import bagel_serving, fatal
from tests.support.cluster import ANSWER_S, LENGTH, STAGES, Answer, all_up, ask_all, body, idle, overrides, until

pytestmark = pytest.mark.engine

BODIES = [body(f"What is number {number}?", 40, 60) for number in range(16)]
UP_S = 60.0


@pytest.fixture(scope="module")
def server(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two API servers and two replicas of each stage."""
    flags = [*LENGTH, *overrides(**{stage: {"replicas": 2} for stage in STAGES}), "--api-server-count", "2"]
    with fatal.installed(), Server(tiny, tmp_path_factory.mktemp("fatal") / "log", flags) as running:
        assert until(lambda: all_up(running, 6), UP_S)
        yield running


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> list[Answer]:
    return ask_all(server, BODIES, len(BODIES))


@pytest.mark.parametrize(
    "stage", [each if each == "talker" else pytest.param(each, marks=pytest.mark.extended) for each in STAGES]
)
def test_a_request_that_ends_its_replicas_fails_alone(stage: str, server: Server, undisturbed: list[Answer]) -> None:
    with ThreadPoolExecutor(len(BODIES) + 1) as threads:
        asked = [threads.submit(ask_all, server, [fields], 1) for fields in BODIES]
        failed = threads.submit(failure, server, "chat/completions", BODIES[0], stage).result()
        answers = [answer for future in asked for answer in future.result()]
    assert answers == undisturbed
    message = failed.json()["error"]["message"]
    assert failed.status_code == 500 and f"stage '{stage}' has lost" in message and "SIGKILL (log: " in message
    assert until(lambda: all_up(server, 6) and idle(server), UP_S)


def failure(server: Server, path: str, fields: dict[str, object], stage: str) -> httpx.Response:
    """Send a request that ends the replicas of a stage."""
    name = {"X-Request-Id": f"fatal-{stage}"}
    return httpx.post(f"{server.base_url}/{path}", json=fields, headers=name, timeout=ANSWER_S)


@pytest.mark.extended
@pytest.mark.parametrize("stage", ["ar", "dit"])
def test_a_request_that_ends_its_replicas_of_bagel_fails_alone(stage: str, bagel: Path, tmp_path: Path) -> None:
    flags = [*bagel_serving.FLAGS, *overrides(ar={"replicas": 2}, dit={"replicas": 2})]
    picture = {"prompt": "a red cat", "height": 64, "width": 64, "num_inference_steps": 12, "seed": 3}
    text = bagel_serving.chat_body(["Tell me about a cat."], "text", max_completion_tokens=40, ignore_eos=True)
    with fatal.installed(), Server(bagel, tmp_path / "log", flags) as server:
        assert until(lambda: all_up(server, 4), UP_S)

        def draw(_: int) -> np.ndarray:
            return bagel_serving.made(server, **picture)

        def write(_: int) -> str:
            answer = httpx.post(f"{server.base_url}/chat/completions", json=text, timeout=ANSWER_S)
            return str(answer.json()["choices"][0]["message"]["content"])

        undisturbed = draw(0), write(0)
        with ThreadPoolExecutor(17) as threads:
            drawn, written = threads.map(draw, range(8)), threads.map(write, range(8))
            path, fields = ("images/generations", picture) if stage == "dit" else ("chat/completions", text)
            failed = threads.submit(failure, server, path, fields, stage).result()
            for each in drawn:
                bagel_serving.assert_same(each, undisturbed[0])
            assert set(written) == {undisturbed[1]}
        assert failed.status_code == 500 and f"stage '{stage}' has lost" in failed.json()["error"]["message"]
        assert until(lambda: all_up(server, 4) and idle(server), UP_S)
