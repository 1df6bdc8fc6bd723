"""Faults of the tests' own tools that would let a test pass wrongly."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support import media, processes, workers
from tests.support.capabilities import needs
from tests.support.nested import run_suite
from tests.support.oracle import Golden, Oracle

LACKING = "library no_such_module_anywhere"
QUESTIONS = ("hello", "say the red cat", "What is the moon?", "Why?", "1 2 3", "A much longer question, really.")


def fork() -> None:
    """Start a child that ends at once."""
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)


@pytest.mark.engine
def test_a_missing_capability_skips_a_test_and_fails_it_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no no_such_module_anywhere here: ModuleNotFoundError"):
        needs(LACKING)
    monkeypatch.setenv("CI", "1")
    with pytest.raises(pytest.fail.Exception, match=f"this machine lacks: {LACKING}"):
        needs(LACKING)
    needs("library json")


def test_every_file_of_a_group_exists() -> None:
    for name in (*workers.SHARED, *workers.APART):
        assert Path(Path(__file__).parents[1], workers.PROCESSES, f"{name}.py").is_file(), name


class Worker:
    """A process of pytest-xdist: runs a test when it has the next one or its shutdown."""

    def __init__(self, name: str) -> None:
        self.gateway = SimpleNamespace(id=name)
        self.shutting_down = False
        self.given: list[int] = []

    def send_runtest_some(self, indexes: list[int]) -> None:
        if not self.shutting_down:  # a process that has read its shutdown reads no more
            self.given += indexes

    def shutdown(self) -> None:
        self.shutting_down = True


@pytest.mark.parametrize("seed", range(300))
def test_all_tests_run_once_although_one_ends_its_process(
    seed: int, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes take their turns in a random order: one may be in a test for long."""
    chance = Random(seed)
    monkeypatch.setattr(pytestconfig.option, "tx", ["popen", "popen"])
    monkeypatch.setattr(pytestconfig.option, "loadscopereorder", False)
    tests = [f"{group}::{number}" for group in "abcd" for number in range(chance.randint(1, 3))]
    dies_at = chance.randrange(len(tests))
    groups = workers.Groups(pytestconfig)
    nodes = [Worker("first"), Worker("second")]
    ran: list[str] = []

    def join(node: Worker) -> None:
        groups.add_node(node)
        groups.add_node_collection(node, tests)

    def turn(node: Worker) -> None:
        if not node.given or not (len(node.given) > 1 or node.shutting_down):
            return
        test = node.given.pop(0)
        ran.append(tests[test])
        if test == dies_at:
            nodes.remove(node)
            assert groups.remove_node(node) == tests[test]
            nodes.append(Worker("third"))
            join(nodes[-1])
            groups.schedule()
        else:
            groups.mark_test_complete(node, test)

    for node in nodes:
        join(node)
    groups.schedule()
    for _ in range(200):
        turn(chance.choice(nodes))
    assert sorted(ran) == tests
    assert all(node.shutting_down for node in nodes)


@pytest.mark.engine
def test_a_nested_suite_that_fails_fails_its_test(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    suite = tmp_path / "test_it.py"
    suite.write_text("def test_one():\n    assert False, 'the reason'\n")
    with pytest.raises(AssertionError, match="exit code 1"):
        run_suite(suite, timeout_s=60, isolated=False)
    assert "the reason" in capsys.readouterr().out


@pytest.mark.engine
@pytest.mark.parametrize("start", [lambda: subprocess.run([sys.executable, "-c", ""], check=True), fork])
def test_a_test_without_the_mark_must_start_no_process(
    start: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_started", [])
    processes.end()
    start()
    with pytest.raises(pytest.fail.Exception, match="mark it `engine`"):
        processes.end()


def ask(oracle: Oracle, content: object, voice: str = "ethan", thinker: int = 12, talker: int = 12) -> Golden:
    messages: Any = [{"role": "user", "content": content}]
    return oracle.run(messages, voice=voice, thinker_max_tokens=thinker, talker_max_tokens=talker)


@pytest.mark.engine
def test_reference_answers_differ_and_end_in_both_ways(oracle: Oracle) -> None:
    config = oracle.model.config
    answers = [ask(oracle, question, thinker=40, talker=60) for question in QUESTIONS]
    assert {golden.thinker_ids[-1] == config.im_end_token_id for golden in answers} == {True, False}
    assert {golden.talker_ids[-1] == config.talker_config.codec_eos_token_id for golden in answers} == {True, False}
    assert len({tuple(golden.thinker_ids) for golden in answers}) == len(answers)
    frames = [frame for golden in answers for frame in map(tuple, golden.frames.tolist())]
    assert len(set(frames)) > 0.9 * len(frames)
    sound = np.concatenate([golden.wav for golden in answers])
    assert 0.05 < np.sqrt(np.mean(sound**2)) < 0.5 and np.mean(np.abs(sound) >= 1) < 0.01


@pytest.mark.engine
def test_media_and_voice_change_the_reference_answer(oracle: Oracle) -> None:
    voices = [ask(oracle, "hello", voice=voice).frames.tolist() for voice in ("chelsie", "aiden")]
    assert voices[0] != voices[1]
    for kind, one, other in (
        ("audio", media.audio(1.01, seed=1), media.audio(1.01, seed=2)),
        ("image", media.image(96, 64, seed=1), media.image(96, 64, seed=2)),
        ("video", media.video(2, 64, 64, seed=1), media.video(2, 64, 64, seed=2)),
    ):
        first, second = (
            ask(oracle, [{"type": kind, kind: each}, {"type": "text", "text": "what"}]) for each in (one, other)
        )
        assert first.prompt_ids == second.prompt_ids
        assert first.thinker_ids != second.thinker_ids and first.frames.tolist() != second.frames.tolist()
