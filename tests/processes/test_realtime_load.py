"""100 realtime sessions at once for a minute, while stages are killed: no turn is lost, and no answer changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from examples.server import Server

pytestmark = [pytest.mark.engine, pytest.mark.extended]

SESSIONS, SECONDS, KILL_EVERY_S = 100, 60.0, 12.0


def test_sessions_while_stages_are_killed(benchmark: Callable[[str], ModuleType], tiny: Path, tmp_path: Path) -> None:
    sessions = benchmark("sessions")
    with Server(tiny, tmp_path / "log", sessions.FLAGS) as server:
        result = asyncio.run(sessions.Run(server, SESSIONS).run(SECONDS, KILL_EVERY_S))
    sessions.show(result)
    assert result.lost == result.wrong == []
    assert result.turns >= SESSIONS * sessions.TURNS and sum(result.killed.values()) >= len(sessions.STAGES)
    assert result.growth() < sessions.MOST_GROWTH
