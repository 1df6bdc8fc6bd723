"""Mixed requests for more than a minute, while each kind of process is killed: nothing is lost, or left over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from examples.server import Server

pytestmark = [pytest.mark.engine, pytest.mark.extended]

SETTLE_S, SECONDS, KILL_EVERY_S, CLIENTS = 40.0, 75.0, 11.0, 4


def test_mixed_requests_while_processes_are_killed(
    benchmark: Callable[[str], ModuleType], tiny: Path, tmp_path: Path
) -> None:
    soak = benchmark("soak")
    with Server(tiny, tmp_path / "log", [*soak.FLAGS, "--stage-overrides", soak.TWO]) as server:
        times = {"seconds": SECONDS, "settle": SETTLE_S, "kill_every": KILL_EVERY_S}
        result = asyncio.run(soak.soak(server, **times, clients=CLIENTS))
    soak.show(result)
    assert result.lost == []
    assert sum(result.killed.values()) >= len(soak.VICTIMS), "each of them once, before the first level"
    # A process that is started again is forked from the head, with the connections that the head has at that time.
    assert [each for each in result.left_over() if "descriptors" not in each] == []
    assert result.levels[1].descriptors["head"] <= result.levels[0].descriptors["head"]
