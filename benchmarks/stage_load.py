"""Sends load to one stage from this process, and records the times of the stage's steps."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from vllm.sampling_params import SamplingParams
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine import EngineCoreOutputs

from vllm_omni_ext.model_plugins.qwen3_omni.http import OPENING
from vllm_omni_ext.model_plugins.qwen_omni.speech import rendered
from vllm_omni_ext.omni import AsyncOmni
from vllm_omni_ext.plugins.runtime import RequestOptions
from vllm_omni_ext.runtime.client.replica import StockReplica
from vllm_omni_ext.runtime.launch.launcher import Deployment
from vllm_omni_ext.serving.served import ServedModel
from vllm_omni_ext.topology.plan import Plan

TEXT = "Tell me about the blue cat in the moon"
PROMPT = list(range(3, 19))

_numbers = itertools.count()


@contextmanager
def deployed(plan: Plan, *, clients: int) -> Iterator[Deployment]:
    """Start the plan's replicas for `clients` API servers, yield them when ready, and end them with the block."""
    with Deployment(plan, clients=clients, usage=UsageContext.LLM_CLASS) as deployment:
        deployment.wait()
        yield deployment


@asynccontextmanager
async def closed_loop(work: Callable[[], Awaitable[None]], concurrency: int) -> AsyncIterator[None]:
    """Run `work` in `concurrency` endless loops during the block; cancel unfinished work at the block's end.

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


@asynccontextmanager
async def open_loop(work: Callable[[float], Awaitable[None]], rate: float, seed: int) -> AsyncIterator[None]:
    """Run `work` at the times of a Poisson process during the block; cancel unfinished work at the block's end.

    Args:
        work: takes its scheduled time, on the clock of `time.monotonic`.
        rate: calls of `work` a second.
        seed: of the random times; equal seeds give equal times.

    Raises:
        ExceptionGroup: work failed.
    """
    chance, tasks = random.Random(seed), set[asyncio.Task[None]]()

    async def one(due: float) -> None:
        await work(due)

    async def arrive() -> None:
        due = time.monotonic()
        while True:
            due += chance.expovariate(rate)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            tasks.add(task := group.create_task(one(due)))
            task.add_done_callback(tasks.discard)

    async with asyncio.TaskGroup() as group:
        tasks.add(group.create_task(arrive()))
        yield
        for task in tuple(tasks):
            task.cancel()


@dataclass(slots=True)
class Step:
    """The output of one engine step, and its times in seconds on the clock that all processes share.

    Attributes:
        made: time at which the engine finished the step.
        received: time at which vLLM's client returned the output.
        handled: time at which this process finished the work on the output.
        items: number of tokens; for a pooling stage, of outputs.
    """

    made: float
    received: float
    handled: float
    items: int


def step_of(outputs: EngineCoreOutputs) -> Step:
    """Return the step of these outputs, received and handled now."""
    now = time.monotonic()
    return Step(outputs.timestamp, now, now, sum(len(output.new_token_ids) or 1 for output in outputs.outputs))


def watch(replica: StockReplica) -> list[Step]:
    """Return a list to which every later step of a replica is added.

    The work on a step counts as finished when the reader of the replica's outputs calls `StockReplica.outputs` again.
    """
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


@dataclass(frozen=True)
class Work:
    """Requests that keep one stage busy; each has `length` tokens, or frames."""

    omni: AsyncOmni
    stage: str
    length: int

    async def __call__(self) -> None:
        """Run one request."""
        number = str(next(_numbers))
        exactly = SamplingParams(temperature=0, min_tokens=self.length, max_tokens=self.length, ignore_eos=True)
        if self.stage == "thinker":
            options = RequestOptions(modalities=("text",))
            async for _ in self.omni.generate({"prompt_token_ids": PROMPT}, exactly, number, options=options):
                pass
            return
        sound = RequestOptions(modalities=("audio",), params={"talker": exactly}, streamed=True)
        text = await rendered(TEXT, ServedModel(self.omni), OPENING)
        async for _ in self.omni.start(text, sound, number):
            pass

    async def over(self) -> None:
        """Wait until each engine has answered a utility call, i.e. has processed all earlier messages, e.g. aborts."""
        for replica in self.omni.replica_connections.replicas.values():
            await replica.client.get_supported_tasks_async()


def open_only(work: Work, count: int) -> None:
    """Open the stage's first `count` replicas for requests, and drain the others."""
    pool = work.omni.orchestrator.pools[work.stage]
    for replica in pool.replicas:
        if replica.index < count:
            pool.add(replica)
        else:
            pool.drain(replica)
