"""Starts the requests of a load test: a fixed number simultaneously, or at the times of a Poisson process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence

import numpy as np

from vllm_omni_ext.loadtest.answers import Answer, Clock

One = Callable[[int, float | None], Awaitable[Answer]]
"""Sends a request; takes the request's number, and its scheduled start on a monotonic clock in seconds (None: now)."""


def arrivals(requests: int, rate: float, seed: int) -> list[float]:
    """Return the first `requests` times, in seconds, of a Poisson process with `rate` events per second."""
    gaps = np.random.default_rng(seed).exponential(1.0 / rate, requests)
    times: list[float] = np.cumsum(gaps).tolist()
    return times


async def closed_loop(requests: int, concurrency: int, one: One) -> list[Answer]:
    """Send `requests` requests, `concurrency` at a time. Each end of a request starts the next request."""
    numbers, answers = iter(range(requests)), []

    async def client(numbers: Iterator[int]) -> None:
        for number in numbers:
            answers.append(await one(number, None))

    async with asyncio.TaskGroup() as clients:
        for _ in range(min(concurrency, requests)):
            clients.create_task(client(numbers))
    return answers


async def open_loop(times: Sequence[float], one: One, clock: Clock) -> list[Answer]:
    """Send a request at each of the times, in seconds from now, independent of the answers to earlier requests."""
    began = clock()
    async with asyncio.TaskGroup() as requests:
        tasks = []
        for number, time in enumerate(times):
            due = began + time
            await asyncio.sleep(max(0.0, due - clock()))
            tasks.append(requests.create_task(_answer(one, number, due)))
    return [task.result() for task in tasks]


async def _answer(one: One, number: int, due: float) -> Answer:
    return await one(number, due)
