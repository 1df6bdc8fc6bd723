"""Timers of an event loop that go off when a test says so, however busy the machine is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

MOST_TURNS = 50


async def settle() -> None:
    """Let everything run that can: nothing but timers, and what waits for other threads, is left."""
    loop: Any = asyncio.get_running_loop()
    for _ in range(MOST_TURNS):
        await asyncio.sleep(0)
        if not loop._ready:
            return


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
        await settle()

    with mock.patch.object(loop, "time", lambda: now):
        yield advance
