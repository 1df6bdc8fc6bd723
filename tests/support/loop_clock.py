"""Timers of an event loop that expire when a test advances the clock, however busy the machine is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


async def settle() -> None:
    """Run all tasks until each waits for a timer or another thread."""
    loop: Any = asyncio.get_running_loop()
    for _ in range(50):
        await asyncio.sleep(0)
        if not loop._ready:
            return


@contextmanager
def stopped_clock() -> Iterator[Callable[[float], Awaitable[None]]]:
    """Inside the block the running loop's time stands still; `await advance(seconds)`, which it yields, advances it."""
    loop = asyncio.get_running_loop()
    now = loop.time()

    async def advance(seconds: float) -> None:
        nonlocal now
        now += seconds
        await settle()

    with mock.patch.object(loop, "time", lambda: now):
        yield advance
