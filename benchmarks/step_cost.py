"""Measures the cost of a step in the API server, compared with a bare vLLM client on the same engine.

`AsyncOmni` and a bare client, vLLM's `AsyncMPClient`, send the same requests to one replica, in turns. The compared
time of each engine step is from the engine's result to the end of all work on it in this process: in the orchestrator,
the pool, the observer and the sending to later stages. The control compares the bare client with itself, which shows
the effect of the machine's noise on a difference. "whole" is the time of a round from the first call to its last step,
divided by its steps; it includes preparing, routing and sending the requests. CPU time is that of this process.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from stage_load import Step, Work, open_only, step_of

from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.runtime.client.replica import StockReplica

MS = 1e3
"""Milliseconds of a second."""
TIMES = ("p50", "p90", "p99")

_numbers = itertools.count()


@dataclass
class Round:
    """One round of one client.

    Attributes:
        steps: the engine's steps.
        seconds: from the first call to the end of the work on the last step.
        cpu: CPU seconds of this process.
    """

    steps: list[Step]
    seconds: float
    cpu: float

    def late(self) -> np.ndarray:
        """Return the time of each step from its result to the end of the work on it, in ms."""
        return np.array([(step.handled - step.made) * MS for step in self.steps])


class Ours:
    """The client "ours": sends requests through `AsyncOmni`.

    Args:
        steps: list to which every step of the replica is added (`stage_load.watch`).
    """

    def __init__(self, work: Work, steps: list[Step]) -> None:
        self._work, self._steps = work, steps

    async def turn(self, concurrency: int) -> None:
        """Send `concurrency` requests at once."""
        await asyncio.gather(*(self._work() for _ in range(concurrency)))

    async def round(self, concurrency: int) -> Round:
        """Send `concurrency` requests at once, and measure."""
        first, began, cpu = len(self._steps), time.monotonic(), time.process_time()
        await self.turn(concurrency)
        steps, cpu = self._steps[first:], time.process_time() - cpu
        await self._work.over()
        return Round(steps, steps[-1].handled - began, cpu)


class Bare:
    """The client "bare": sends engine requests that were recorded from `Ours` through vLLM's client alone."""

    def __init__(self, client: Any, messages: Sequence[Any]) -> None:
        self._client, self._messages = client, messages

    async def round(self, concurrency: int) -> Round:
        """Send the recorded requests, and measure."""
        suffix, open_ids, steps = f"-{next(_numbers)}", set(), []
        began, cpu = time.monotonic(), time.process_time()
        for message in self._messages:
            again = copy.copy(message)
            again.request_id += suffix
            open_ids.add(again.request_id)
            await self._client.add_request_async(again)
        while open_ids:
            outputs = await self._client.get_output_async()
            if outputs.outputs:
                steps.append(step_of(outputs))
            open_ids -= {output.request_id for output in outputs.outputs if output.finish_reason is not None}
        return Round(steps, steps[-1].handled - began, time.process_time() - cpu)


@dataclass
class Overhead:
    """The cost of a step with one number of concurrent requests.

    Attributes:
        steps: number of measured steps.
        rows: milliseconds by name of the figure and by percentile (`TIMES`).
    """

    concurrency: int
    steps: int
    rows: dict[str, dict[str, float]] = field(default_factory=dict)


async def recorded(replica: StockReplica, turn: Callable[[], Awaitable[None]]) -> list[Any]:
    """Return all requests that a replica receives while `turn` runs."""
    messages: list[Any] = []
    add = replica.add

    async def noting(request: Any) -> None:
        messages.append(copy.copy(request))
        await add(request)

    replica.add = noting  # type: ignore[method-assign]
    try:
        await turn()
    finally:
        replica.add = add  # type: ignore[method-assign]
    return messages


async def overhead(work: Work, client: Any, steps: list[Step], concurrency: int, rounds: int) -> Overhead:
    """Measure the cost of a step.

    Rounds of `Ours`, of the bare client, and of the bare client again (the control) are run in changing order. The
    first round of each warms up.

    Args:
        client: vLLM's client of the replica.
        steps: list to which every step of the replica is added (`stage_load.watch`).
    """
    open_only(work, 1)
    ours = Ours(work, steps)
    replica = work.omni.replica_connections.replicas[ReplicaId(work.stage, 0)]
    messages = await recorded(replica, lambda: ours.turn(concurrency))
    await work.over()
    runs: dict[str, tuple[Any, list[Round]]] = {"ours": (ours, [])}
    runs |= {name: (Bare(client, messages), []) for name in ("bare", "control")}
    order = list(runs)
    for _ in range(rounds + 1):
        for name in order:
            who, done = runs[name]
            done.append(await who.round(concurrency))
        order.append(order.pop(0))
    return compared(concurrency, *(done[1:] for _, done in runs.values()))


def compared(concurrency: int, ours: list[Round], bare: list[Round], control: list[Round]) -> Overhead:
    """Return the percentiles of the times of steps, of their differences step by step, and of whole rounds."""
    result = Overhead(concurrency, sum(len(each.steps) for each in ours))
    inside = [(step.handled - step.received) * MS for each in ours for step in each.steps]
    values = {
        "ours": np.concatenate([each.late() for each in ours]),
        "of it in our code": np.array(inside),
        "bare client": np.concatenate([each.late() for each in bare]),
        "ours - bare": differences(ours, bare),
        "bare - bare (control)": differences(control, bare),
        "whole: ours - bare": whole(ours) - whole(bare),
        "whole: bare - bare (control)": whole(control) - whole(bare),
        "CPU time: ours": np.array([each.cpu / len(each.steps) * MS for each in ours]),
        "CPU time: bare client": np.array([each.cpu / len(each.steps) * MS for each in bare]),
    }
    for name, each in values.items():
        result.rows[name] = dict(zip(TIMES, np.percentile(each, (50, 90, 99)).tolist(), strict=True))
    return result


def differences(ours: list[Round], bare: list[Round]) -> np.ndarray:
    """Return, for all rounds, the time of step k of one client minus that of step k of the other client, in ms."""
    pairs = [(a.late(), b.late()) for a, b in zip(ours, bare, strict=True)]
    return np.concatenate([a[: len(b)] - b[: len(a)] for a, b in pairs])


def whole(rounds: list[Round]) -> np.ndarray:
    """Return the time of each round divided by its steps, in ms."""
    return np.array([each.seconds / len(each.steps) * MS for each in rounds])
