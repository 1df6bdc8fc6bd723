"""Coordinators, replicas and subscribers as real processes on 127.0.0.1."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vllm_omni_ext.coordinator.keys import Keys
from vllm_omni_ext.coordinator.members import Member, State, View
from vllm_omni_ext.coordinator.membership import Timing
from vllm_omni_ext.coordinator.server import CoordinatorConfig, listening, run
from vllm_omni_ext.coordinator.watcher import Watcher

KEY = "the head's"
TIMEOUT_S = 1.0
CONFIG = CoordinatorConfig(timing=Timing(timeout_s=TIMEOUT_S, drain_s=5.0), key=KEY)
PATIENCE_S = 45.0
"""For anything that should happen at all."""

REPLICA = """
import sys
from vllm_omni_ext.coordinator.keys import Keys
from vllm_omni_ext.coordinator.members import Member
from vllm_omni_ext.coordinator.reporter import Reporter
from vllm_omni_ext.pool.load import Load

address, stage, index, epoch, proof, interval_s, secret = sys.argv[1:]
me, keys = Member(stage, int(index), int(epoch)), Keys.read(secret or None)
reporter = Reporter(address, me, proof, lambda: Load(1, 2, 0.5), interval_s=float(interval_s), keys=keys)
reporter.start()
sys.stdin.read()
reporter.stop()
"""


class CoordinatorProcess:
    """A coordinator; `restart` starts another on the same addresses."""

    def __init__(self, config: CoordinatorConfig) -> None:
        self._config = config
        self.start()

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.control, theirs = context.Pipe()
        self.process = context.Process(target=run, args=(self._config, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.events, self.views = listening(self.control, PATIENCE_S)
        self._config = replace(self._config, events=self.events, views=self.views)

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def end(self) -> int | None:
        self.control.close()
        self.process.join(PATIENCE_S)
        return self.process.exitcode


@pytest.fixture
def coordinator() -> Iterator[Callable[..., CoordinatorProcess]]:
    started: list[CoordinatorProcess] = []

    def start(config: CoordinatorConfig = CONFIG) -> CoordinatorProcess:
        started.append(CoordinatorProcess(config))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.join()
        each.control.close()


@pytest.fixture
def replica() -> Iterator[Callable[..., subprocess.Popen]]:
    started: list[subprocess.Popen] = []

    def start(
        address: str, stage: str = "talker", secret: str | Path = "", index: int = 0, epoch: int = 1, key: str = KEY
    ) -> subprocess.Popen:
        proof, interval_s = Member(stage, index, epoch).proof(key), CONFIG.timing.interval_s
        words = (address, stage, str(index), str(epoch), proof, str(interval_s), str(secret))
        command = [sys.executable, "-c", REPLICA, *words]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()


class Witness:
    """A subscriber that keeps all changes."""

    def __init__(self, watcher: Watcher) -> None:
        self.watcher = watcher
        self.changes: list[Any] = []

    async def until(self, wanted: Callable[[View], bool]) -> View:
        """The next view for which `wanted` is true."""
        async with asyncio.timeout(PATIENCE_S):
            async for view, changes in self.watcher:
                self.changes.extend(changes)
                if wanted(view):
                    return view
        raise AssertionError("the watcher was closed")

    async def states(self, **wanted: State) -> View:
        """The next view in which exactly these replicas are in these states."""
        expected = {name.replace("_", "/"): state for name, state in wanted.items()}
        return await self.until(lambda view: states(view) == expected)


def states(view: View) -> dict[str, State]:
    return {str(entry.member.id): entry.state for entry in view.replicas}


@contextlib.asynccontextmanager
async def watching(address: str, keys: Keys | None = None) -> AsyncIterator[Witness]:
    watcher = Watcher(address, keys=keys)
    try:
        yield Witness(watcher)
    finally:
        watcher.close()


@pytest.fixture
def freeze() -> Iterator[Callable[[int], None]]:
    """Stop a process; it continues at the end of the test at the latest."""
    stopped: list[int] = []

    def stop(pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        stopped.append(pid)

    yield stop
    for pid in stopped:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
