"""Stages that are owed input, and what happens when it does not come. One timer for each, nothing polls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

Late = Callable[[str, str, str], Coroutine[Any, Any, None]]
"""Called with the request's id, the stage that waits and the stage it waits for."""


@dataclass
class _Owed:
    source: str
    since: float
    timer: asyncio.TimerHandle | None = None


class Deadlines:
    """Which stages of which requests wait for more input.

    Args:
        limit_s: how long after what came last.
        late: what to do then.
    """

    def __init__(self, limit_s: float, late: Late) -> None:
        self._limit_s = limit_s
        self._late = late
        self._owed: dict[tuple[str, str], _Owed] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._owed)

    def given(self, request_id: str, stage: str, source: str, *, last: bool) -> None:
        """A stage got input from `source`; unless it was the last, it is owed more from now on."""
        key, loop = (request_id, stage), asyncio.get_running_loop()
        if last:
            self.settle(request_id, stage)
        elif key in self._owed:  # its timer looks again when it fires: cheaper than a new one for each chunk
            self._owed[key].since = loop.time()
        else:
            self._owed[key] = owed = _Owed(source, loop.time())
            owed.timer = loop.call_later(self._limit_s, self._look, key)

    def settle(self, request_id: str, stage: str) -> None:
        """A stage has all its input, or has ended."""
        owed = self._owed.pop((request_id, stage), None)
        if owed is not None and owed.timer is not None:
            owed.timer.cancel()

    def _look(self, key: tuple[str, str]) -> None:
        owed, loop = self._owed[key], asyncio.get_running_loop()
        due = owed.since + self._limit_s
        if loop.time() < due:
            owed.timer = loop.call_at(due, self._look, key)
            return
        del self._owed[key]
        task = loop.create_task(self._late(*key, owed.source))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
