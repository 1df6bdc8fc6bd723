"""Timers of an event loop that go off when a test says so, however busy the machine is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from unittest import mock

TURNS = 10
"""Turns of the loop in which tasks that a timer wakes come to their next wait."""


@contextmanager
def stopped_clock() -> Iterator[Callable[[float], Awaitable[None]]]:
    """Inside the block, the running loop's time stands still, but for calls of what the block gets.

    with stopped_clock() as advance:
        loop.call_later(5.0, print, "five seconds are over")
        await advance(5.0)
    """
    loop = asyncio.get_running_loop()
    now = loop.time()

    async def advance(seconds: float) -> None:
        nonlocal now
        now += seconds
        for _ in range(TURNS):
            await asyncio.sleep(0)

    with mock.patch.object(loop, "time", lambda: now):
        yield advance
