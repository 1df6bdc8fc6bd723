"""BAGEL's stages in processes of their own that join a head."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from examples.server import HOST, Program, Server, command
from tests.families.serving import chat, picture, settled
from tests.support.bagel_runs import golden
from tests.support.bagel_serving import CASES, alone, ask_for, assert_golden, assert_same, chat_body
from tests.support.cluster import LENGTH, all_up, free_ports, get, replicas, states, until
from vllm_omni_ext.model_plugins.bagel.model import Bagel

pytestmark = pytest.mark.engine

PORTS = 3
UP_S = 120.0
PROMPT = "a red cat"
GIVEN = {"num_timesteps": 5, "seed": 1, "max_think_token_n": 16}
TIMES = ["--omni-heartbeat-timeout", "3", "--omni-drain-timeout", "20"]

Join = Callable[[str, int, int], Program]


@pytest.fixture(scope="module")
def join(bagel: Path, tmp_path_factory: pytest.TempPathFactory) -> Join:
    """Start replicas of a stage, by its place in the pipeline, that join the head: name, stage, replicas."""
    logs, port = tmp_path_factory.mktemp("joined"), free_ports(PORTS)

    def program(name: str, stage: int, count: int) -> Program:
        words = [*command(), "serve", str(bagel), "--omni", "--stage-id", str(stage), "-oma", HOST, "-omp", str(port)]
        if name != "head":
            words += ["--headless"]
        return Program([*words, "--omni-dp-size-local", str(count), *LENGTH[2:], *TIMES], logs / name)

    return program


@pytest.fixture(scope="module")
def head(bagel: Path, join: Join, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A head with two replicas of `ar`, and a process with two replicas of `dit` that has joined it."""
    words = join("head", 0, 2).words
    flags = words[words.index("--stage-id") :]
    server = Server(bagel, tmp_path_factory.mktemp("head") / "log", [*LENGTH[:2], *flags])
    with contextlib.ExitStack() as stack:
        server.start()
        stack.callback(server.stop)
        assert until(lambda: get(server, "/health")[0] == 503, UP_S), server.tail()
        dit = join("dit", 1, 2)
        dit.start()
        stack.callback(dit.stop)
        server.wait()
        assert until(lambda: all_up(server, 4), UP_S), states(server)
        yield server


def check(server: Server, model: Bagel) -> None:
    """Pictures, replies and thoughts are right."""
    for name in CASES:
        assert_golden(ask_for(server, name), name)
    run = golden("understand_fp32")
    body = chat_body(run.parts, "text", max_completion_tokens=23, return_token_ids=True)
    assert chat(server, body)["choices"][0]["token_ids"] == run.info["generated_ids"][0][1:]
    expected, thought = alone(model, [PROMPT], height=32, width=48, think=True, **GIVEN)
    answer = chat(server, chat_body([PROMPT], "text", "image", size="48x32", **GIVEN))
    assert answer["choices"][0]["message"]["content"] == thought
    assert_same(picture(answer), expected)


def test_two_of_ar_in_the_head_and_two_of_dit_in_another_process(head: Server, bagel_model: Bagel) -> None:
    assert {name.split("/")[0] for name in replicas(head)} == {"ar", "dit"}
    check(head, bagel_model)
    with ThreadPoolExecutor(8) as threads:
        for name, found in [(name, threads.submit(ask_for, head, name)) for name in CASES * 3]:
            assert_golden(found.result(), name)
    assert settled(head)


def test_more_of_both_join_and_leave(head: Server, join: Join, bagel_model: Bagel) -> None:
    ar, dit = join("more ar", 0, 2), join("more dit", 1, 1)
    try:
        ar.start()
        dit.start()
        assert until(lambda: all_up(head, 7), UP_S), states(head)
        check(head, bagel_model)
    finally:
        dit.stop()
        ar.stop()
    assert until(lambda: all_up(head, 4), UP_S), states(head)
    check(head, bagel_model)
    assert settled(head)
