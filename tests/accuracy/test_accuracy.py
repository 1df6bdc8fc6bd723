"""The trained model is understood, understands, and answers alike through every topology."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from examples.server import Server
from tests.accuracy.answers import Answer
from tests.accuracy.broken import FAULTS, answers_of, answers_with, others
from tests.accuracy.cases import Case
from tests.accuracy.conftest import CASES
from tests.accuracy.figures import LEAST, figures, recognisers, too_low
from tests.support.capabilities import needs
from tests.support.cluster import (
    LENGTH,
    STAGES,
    asked_again,
    kill,
    overrides,
    wait_busy,
)
from tests.support.nested import run_suite
from vllm_omni_ext.disaggregation.parameters import CONNECTORS

pytestmark = [pytest.mark.engine, pytest.mark.extended]

UP_S, SUITE_S = 300.0, 3000.0
TWO = {stage: {"replicas": 2} for stage in STAGES}
FLAGS = {
    "a stage starts when the one before has finished": ["--no-async-chunk"],
    "two replicas of each stage, two API servers": [*overrides(**TWO), "--api-server-count", "2"],
}


def test_words_are_right(asked: list[Case], usual: dict[str, Answer]) -> None:
    found = figures(asked, usual, recognisers())
    print(json.dumps(found, indent=1))
    assert found.keys() == LEAST.keys()
    assert too_low(found, asked) == {}


def check_alike(answers: dict[str, Answer], usual: dict[str, Answer]) -> None:
    """Texts are equal; sounds and probabilities differ by rounding at most."""
    assert {name: answer.text for name, answer in answers.items()} == {n: answer.text for n, answer in usual.items()}
    assert answers.keys() == usual.keys()
    assert others(answers, usual) == []


@pytest.mark.parametrize("frames", ["all", [1], [3, 7]], ids="chunks of frames: {}".format)
def test_other_chunks(frames: Any, server: Server, asked: list[Case], usual: dict[str, Answer]) -> None:
    speaking = [case for case in asked if case.voice]
    answers = answers_of(server, speaking, chunks={"frames": frames})
    check_alike(answers, {case.name: usual[case.name] for case in speaking})


@pytest.mark.parametrize("name", FLAGS)
def test_another_topology(
    name: str, trained: Path, asked: list[Case], usual: dict[str, Answer], tmp_path: Path
) -> None:
    with Server(trained, tmp_path / "log", [*LENGTH, *FLAGS[name]]) as server:
        check_alike(answers_of(server, asked), usual)


def test_while_replicas_are_killed(trained: Path, asked: list[Case], usual: dict[str, Answer], tmp_path: Path) -> None:
    with Server(trained, tmp_path / "log", [*LENGTH, *overrides(**TWO)]) as server:
        for stage in STAGES:
            with asked_again(lambda: answers_of(server, asked)) as answers:
                kill(server, wait_busy(server, stage))
            for each in answers.result():
                check_alike(each, usual)


def test_prefill_and_decode_apart(request: pytest.FixtureRequest) -> None:
    needs(f"library {CONNECTORS['mooncake'].module}", "isolation")
    cases = str(request.config.getoption("--cases", CASES))
    run_suite(Path(__file__).with_name("prefill_decode_suite.py"), "--cases", cases, timeout_s=SUITE_S)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(
    fault: str, trained: Path, asked: list[Case], usual: dict[str, Answer], tmp_path: Path
) -> None:
    """By words or voices that are wrong, but for one: positions of embeddings change little in a sound with pauses."""
    heard = [case for case in asked if case.kind in ("say", "hear")]
    try:
        answers = answers_with(fault, trained, tmp_path / "log", heard)
    except openai.InternalServerError as error:
        # A talker that reads ahead of its turn may wait for a word that is handed over when it is due: a found fault.
        assert fault == "text one frame ahead" and "chunk_timeout_s" in str(error)
        return
    assert others(answers, usual)
    if "encoder" not in fault:
        assert too_low(figures(heard, answers, recognisers()), heard)
