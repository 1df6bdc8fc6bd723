"""A request that ends the process of each replica that runs it fails alone; all others are answered as without it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from examples.server import Server
from tests.support import fatal
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
        name = {"X-Request-Id": f"fatal-{stage}"}
        path = f"{server.base_url}/chat/completions"
        failed = threads.submit(httpx.post, path, json=BODIES[0], headers=name, timeout=ANSWER_S).result()
        answers = [answer for future in asked for answer in future.result()]
    assert answers == undisturbed
    message = failed.json()["error"]["message"]
    assert failed.status_code == 500 and f"stage '{stage}' has lost" in message and "SIGKILL (log: " in message
    assert until(lambda: all_up(server, 6) and idle(server), UP_S)
