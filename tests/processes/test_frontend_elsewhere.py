"""A head without a replica of the stage that writes text: its replicas join from other processes."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from examples.server import HOST, Server
from tests.support.cluster import LENGTH, Headless, all_up, ask, body, free_ports, get, states, until

pytestmark = [pytest.mark.engine, pytest.mark.extended]

UP_S = 180.0  # three engines start while others run


def test_a_request_is_answered_when_the_text_stage_joins_the_head(tiny: Path, tmp_path: Path) -> None:
    port = free_ports(3)
    head = Server(tiny, tmp_path / "head", [*LENGTH, "--stage", "code2wav", "-oma", HOST, "-omp", str(port)])
    with contextlib.ExitStack() as stack:
        head.start()
        stack.callback(head.stop)
        assert until(lambda: get(head, "/health")[0] == 503, UP_S), head.tail()
        for stage in ("thinker", "talker"):
            stack.enter_context(Headless(tiny, tmp_path / stage, stage, port))
        head.wait()
        assert until(lambda: all_up(head, 3), UP_S), states(head)
        answer = ask(head, body("Tell me about number 1.", 10, 12))
        assert answer.text and answer.samples.size
        assert answer.where["thinker"] == "thinker/0"
