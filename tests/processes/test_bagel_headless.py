"""BAGEL's stages in processes of their own that join a head."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from examples.server import HOST, Program, Server, command
from tests.families.serving import chat, picture, settled
from tests.support.bagel_serving import (
    CASES,
    alone,
    ask_for,
    assert_golden,
    assert_same,
    chat_body,
    expected_reply,
    reply,
)
from tests.support.cluster import LENGTH, all_up, free_ports, get, states, until
from vllm_omni_ext.model_plugins.bagel.model import Bagel

pytestmark = [pytest.mark.engine, pytest.mark.extended]

UP_S = 120.0
PROMPT = "a red cat"
GIVEN = {"num_timesteps": 5, "seed": 1, "max_think_token_n": 16}
TIMES = ["--omni-heartbeat-timeout", "3", "--omni-drain-timeout", "20"]

Join = Callable[[str, int, int], Program]


@pytest.fixture
def join(bagel: Path, tmp_path: Path) -> Join:
    """Start replicas of a stage, by its place in the pipeline, that join the head: name, stage, replicas."""
    port = free_ports(3)

    def program(name: str, stage: int, count: int) -> Program:
        words = [*command(), "serve", str(bagel), "--omni", "--stage-id", str(stage), "-oma", HOST, "-omp", str(port)]
        words += TIMES if name == "head" else ["--headless"]
        return Program([*words, "--omni-dp-size-local", str(count), *LENGTH[2:]], tmp_path / name)

    return program


def check(server: Server, model: Bagel) -> None:
    """Pictures and replies equal the reference, thoughts the model."""
    for name in CASES:
        assert_golden(ask_for(server, name), name)
    assert reply(server, "understand_fp32") == expected_reply("understand_fp32")
    expected, thought = alone(model, [PROMPT], height=32, width=48, think=True, **GIVEN)
    answer = chat(server, chat_body([PROMPT], "text", "image", size="48x32", **GIVEN))
    assert answer["choices"][0]["message"]["content"] == thought
    assert_same(picture(answer), expected)


def test_answers_stay_the_same_when_replicas_of_both_stages_join_and_leave(
    bagel: Path, join: Join, tmp_path: Path, bagel_model: Bagel
) -> None:
    """Two of `ar` in the head and two of `dit` in another process; then two and one more, of other processes."""
    words = join("head", 0, 2).words
    head = Server(bagel, tmp_path / "log", [*LENGTH[:2], *words[words.index("--stage-id") :]])
    with contextlib.ExitStack() as stack:
        head.start()
        stack.callback(head.stop)
        assert until(lambda: get(head, "/health")[0] == 503, UP_S), head.tail()
        dit = join("dit", 1, 2)
        dit.start()
        stack.callback(dit.stop)
        head.wait()
        assert until(lambda: all_up(head, 4), UP_S), states(head)
        check(head, bagel_model)
        with ThreadPoolExecutor(8) as threads:
            for name, found in [(name, threads.submit(ask_for, head, name)) for name in CASES * 3]:
                assert_golden(found.result(), name)
        with contextlib.ExitStack() as more:
            for joined in (join("more ar", 0, 2), join("more dit", 1, 1)):
                joined.start()
                more.callback(joined.stop)
            assert until(lambda: all_up(head, 7), UP_S), states(head)
            check(head, bagel_model)
        assert until(lambda: all_up(head, 4), UP_S), states(head)
        check(head, bagel_model)
        assert settled(head)
