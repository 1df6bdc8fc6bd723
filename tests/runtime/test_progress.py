"""What is said while replicas start."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.runtime.progress import Progress, spinner


def plan(**counts: int) -> Any:
    return SimpleNamespace(
        stages=[
            SimpleNamespace(name=name, replicas=[SimpleNamespace(id=ReplicaId(name, i)) for i in range(count)])
            for name, count in counts.items()
        ]
    )


def test_one_line_a_stage() -> None:
    said: list[str] = []
    seconds = iter([3.0, 5.25])
    progress = Progress(plan(thinker=1, talker=2, code2wav=0), said.append, lambda: next(seconds))
    progress.starting("in /logs")
    progress.ready(ReplicaId("talker", 1))
    progress.ready(ReplicaId("thinker", 0))
    progress.ready(ReplicaId("talker", 0))
    assert said == [
        "starting thinker (1 replica), talker (2 replicas); logs in /logs",
        "thinker ready after 3.0 s",
        "talker ready after 5.2 s",
    ]


def test_nothing_moves_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with spinner("loading"):
        print("line")
    assert capsys.readouterr().out == "line\n"
