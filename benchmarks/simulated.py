"""Engines whose device time is stated instead of computed, load for them, and a look at their steps.

A step takes a stated time, computing included, and the process sleeps through what is left of it: so neither the cores
of this machine nor how many engines share them matter, as long as the tiny model computes in less. The executor is
chosen by vLLM's own argument `distributed_executor_backend`, for a stage (`engine`) as for a stock server (`flags`).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from vllm_omni_ext.runtime.launcher import Deployment
from vllm_omni_ext.runtime.replica import StockReplica
from vllm_omni_ext.topology.shape import Plan

STEP = "step_s"
"""Key of `additional_config`: seconds a step takes."""

PYTHONPATH = str(Path(__file__).parent)
"""Where a server that is a process of its own finds this module."""


class TimedExecutor(UniProcExecutor):
    """Runs the model, and keeps its results back until the step has taken its time."""

    def _init_executor(self) -> None:
        self._step_s = float(self.vllm_config.additional_config[STEP])
        self._ends = 0.0
        super()._init_executor()

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """Begin a step; one of a pooling model is over with it."""
        self._ends = time.monotonic() + self._step_s if scheduler_output.total_num_scheduled_tokens else 0.0
        output = super().execute_model(scheduler_output, non_block)
        if (output.result() if non_block else output) is not None:
            self._wait()
        return output

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        """End a step."""
        output = super().sample_tokens(grammar_output, non_block)
        self._wait()
        return output

    def _wait(self) -> None:
        time.sleep(max(0.0, self._ends - time.monotonic()))


def engine(step_s: float) -> dict[str, Any]:
    """Engine arguments of a stage whose steps take `step_s` seconds."""
    return {"distributed_executor_backend": "simulated.TimedExecutor", "additional_config": {STEP: step_s}}


def flags(step_s: float) -> list[str]:
    """The same as flags of `vllm serve`, whose environment needs `PYTHONPATH`."""
    words = [(f"--{name.replace('_', '-')}", value) for name, value in engine(step_s).items()]
    return [word for name, value in words for word in (name, value if isinstance(value, str) else json.dumps(value))]


@contextmanager
def deployed(plan: Plan, *, clients: int) -> Iterator[Deployment]:
    """The plan's replicas, ready for so many API servers; ended with the block."""
    with Deployment(plan, clients=clients, usage=UsageContext.LLM_CLASS) as deployment:
        deployment.wait()
        yield deployment


@asynccontextmanager
async def closed_loop(work: Callable[[], Awaitable[None]], concurrency: int) -> AsyncIterator[None]:
    """So many at work during the block, each beginning anew when it is done; what is unfinished at its end is aborted.

    Raises:
        ExceptionGroup: work failed.
    """

    async def again() -> None:
        while True:
            await work()

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(again()) for _ in range(concurrency)]
        yield
        for task in tasks:
            task.cancel()


@dataclass(slots=True)
class Step:
    """What one engine step put out, and when; times in seconds on the clock that all processes share.

    Attributes:
        made: the engine had it.
        received: vLLM's client gave it out.
        handled: everything that follows from it here was done.
        items: tokens; of a pooling stage, outputs.
    """

    made: float
    received: float
    handled: float
    items: int


def step_of(outputs: EngineCoreOutputs) -> Step:
    """A step that was received just now and needs no handling."""
    now = time.monotonic()
    return Step(outputs.timestamp, now, now, sum(len(output.new_token_ids) or 1 for output in outputs.outputs))


def watch(replica: StockReplica) -> list[Step]:
    """A list that grows with every step of a replica. Who reads from the replica asks for the next when one is done."""
    steps: list[Step] = []
    outputs = replica.outputs

    async def watched() -> EngineCoreOutputs:
        if steps and steps[-1].handled == steps[-1].received:
            steps[-1].handled = time.monotonic()
        taken = await outputs()
        if taken.outputs:
            steps.append(step_of(taken))
        return taken

    replica.outputs = watched  # type: ignore[method-assign]
    return steps
