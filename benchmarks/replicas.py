"""What replicas of a stage add, and what a step costs beside a bare vLLM client; device time is simulated.

Throughput: one stage's steps take `--step` seconds, its pool has 1, 2 or 4 open replicas, requests come in a closed
loop with twice as many as the open replicas can run at once. Counted is what comes out of the stage.

Overhead: a second client, vLLM's `AsyncMPClient` alone, sends one replica the very same requests as the stage pool
did; they take turns. Compared is, for each step of the engine, the time from its result to everything being done that
follows from it: the orchestrator, the pool, what is noted, the stages behind. The control compares the bare client with
itself: that is what the machine's noise makes of a difference. "whole" is a round from the first call to its last step,
divided by its steps: preparing, routing and sending the requests is in it. CPU time is that of this process.

    python benchmarks/replicas.py [MODEL] [--stages talker thinker] [--step 0.05] [--rounds 3] [--json FILE]
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from checkpoint import checkpoint, parser
from simulated import Step, closed_loop, deployed, engine, step_of, watch
from vllm.sampling_params import SamplingParams

from vllm_omni_ext.cli.settings import from_kwargs
from vllm_omni_ext.compat import activate
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.omni import AsyncOmni
from vllm_omni_ext.orchestrator.requests import OmniOptions
from vllm_omni_ext.runtime.replica import StockReplica

TEXT = "Tell me about the blue cat in the moon"
PROMPT = list(range(3, 19))
SLOTS = 4
"""Requests a replica runs at once."""
QUEUE = 2
"""Requests in the closed loop for each slot: a slot that falls free is filled at once."""
SETTLE_S = 1.5
TIMES = ("p50", "p90", "p99")
MS = 1e3

_numbers = itertools.count()


@dataclass(frozen=True)
class Work:
    """Requests that keep one stage busy: `length` tokens, or frames, each."""

    omni: AsyncOmni
    stage: str
    length: int

    async def __call__(self) -> None:
        """One request."""
        number = str(next(_numbers))
        exactly = SamplingParams(temperature=0, min_tokens=self.length, max_tokens=self.length, ignore_eos=True)
        if self.stage == "thinker":
            text = OmniOptions(modalities=("text",))
            async for _ in self.omni.generate({"prompt_token_ids": PROMPT}, exactly, number, options=text):
                pass
            return
        sound = OmniOptions(modalities=("audio",), sampling={"talker": exactly})
        async for _ in (await self.omni.speak(TEXT, sound, number)).pieces():
            pass

    async def over(self) -> None:
        """Wait until nothing of any request is left, in the engines neither."""
        for replica in self.omni.fleet.replicas.values():
            await replica.client.get_supported_tasks_async()


# -- throughput -------------------------------------------------------------------------------------------------


@dataclass
class Throughput:
    """Items a second by number of open replicas, one for each round. `ideal`: of one replica without any pause."""

    ideal: float
    rates: dict[int, list[float]] = field(default_factory=dict)

    def scaling(self, count: int) -> float:
        """Median rate, in those of one replica."""
        return statistics.median(self.rates[count]) / statistics.median(self.rates[1])


async def throughput(work: Work, steps: dict[ReplicaId, list[Step]], args: Any) -> Throughput:
    """Open 1, 2, 4 replicas, 4, 2, 1, and so on."""
    result = Throughput(SLOTS / args.step, {count: [] for count in args.replicas})
    counts = list(args.replicas)
    for _ in range(args.rounds):
        for count in counts:
            result.rates[count].append(await rate(work, count, steps, args.seconds))
        counts.reverse()
    return result


async def rate(work: Work, count: int, steps: dict[ReplicaId, list[Step]], seconds: float) -> float:
    """Items a second that the stage puts out with `count` open replicas."""
    open_only(work, count)
    async with closed_loop(work, QUEUE * SLOTS * count):
        await asyncio.sleep(SETTLE_S)
        began = time.monotonic()
        await asyncio.sleep(seconds)
        ended = time.monotonic()
    await work.over()
    return sum(step.items for each in steps.values() for step in each if began <= step.made < ended) / (ended - began)


def open_only(work: Work, count: int) -> None:
    """Let the stage's first `count` replicas take requests."""
    pool = work.omni.orchestrator.pools[work.stage]
    for replica in pool.replicas:
        if replica.index < count:
            pool.add(replica)
        else:
            pool.drain(replica)


# -- overhead ---------------------------------------------------------------------------------------------------


@dataclass
class Round:
    """One client's turn. `seconds` from the first call to the last step; `cpu` of this process, in seconds."""

    steps: list[Step]
    seconds: float
    cpu: float

    def late(self) -> np.ndarray:
        """Of each step: from its result to everything being done, in ms."""
        return np.array([(step.handled - step.made) * MS for step in self.steps])


class Ours:
    """Sends through `AsyncOmni`."""

    def __init__(self, work: Work, steps: list[Step]) -> None:
        self._work, self._steps = work, steps

    async def turn(self, concurrency: int) -> None:
        """So many requests at once."""
        await asyncio.gather(*(self._work() for _ in range(concurrency)))

    async def round(self, concurrency: int) -> Round:
        """So many requests at once, measured."""
        first, began, cpu = len(self._steps), time.monotonic(), time.process_time()
        await self.turn(concurrency)
        steps, cpu = self._steps[first:], time.process_time() - cpu
        await self._work.over()
        return Round(steps, steps[-1].handled - began, cpu)


class Bare:
    """Sends what was recorded of ours through vLLM's client alone."""

    def __init__(self, client: Any, messages: Sequence[Any]) -> None:
        self._client, self._messages = client, messages

    async def round(self, concurrency: int) -> Round:
        """The recorded requests."""
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
    """Milliseconds for each step, by what they are."""

    concurrency: int
    steps: int
    rows: dict[str, dict[str, float]] = field(default_factory=dict)


async def recorded(replica: StockReplica, turn: Callable[[], Awaitable[None]]) -> list[Any]:
    """Everything a replica is sent while `turn` runs."""
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
    """Rounds of ours, of the bare client and of the bare client once more, in changing order; the first warms up."""
    open_only(work, 1)
    ours = Ours(work, steps)
    replica = work.omni.fleet.replicas[ReplicaId(work.stage, 0)]
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
    """The distributions, step by step and round by round."""
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
    """Step k of a round minus step k of the other's."""
    pairs = [(a.late(), b.late()) for a, b in zip(ours, bare, strict=True)]
    return np.concatenate([a[: len(b)] - b[: len(a)] for a, b in pairs])


def whole(rounds: list[Round]) -> np.ndarray:
    """Of each round: its time divided by its steps, in ms."""
    return np.array([each.seconds / len(each.steps) * MS for each in rounds])


# -- the program ------------------------------------------------------------------------------------------------


async def measure(deployment: Any, stage: str, args: Any) -> tuple[Throughput | None, list[Overhead]]:
    """Both, for one stage."""
    omni = AsyncOmni(deployment.connections(0))
    first = ReplicaId(stage, 0)
    other = deployment.connections(1)
    bare = other.connect(first, other.addresses[first])
    try:
        work = Work(omni, stage, args.length)
        steps = {replica.id: watch(replica) for replica in omni.fleet.replicas.values() if replica.id.stage == stage}
        await work()
        speeds = await throughput(work, steps, args) if args.seconds else None
        costs = [await overhead(work, bare.client, steps[first], c, args.turns) for c in args.concurrency if args.turns]
        return speeds, costs
    finally:
        bare.close(timeout=0)
        omni.shutdown(timeout=0)


def show(stage: str, speeds: Throughput | None, costs: list[Overhead], args: Any) -> None:
    """Print both tables."""
    print(f"{stage}: {args.step * MS:g} ms a step, {SLOTS} requests a replica, {args.length} items a request")
    if speeds is not None:
        print(f"{'replicas':>10}{'items/s':>10}{'smallest':>10}{'largest':>10}{'scaling':>10}{'of ideal':>10}")
        for count, rates in speeds.rates.items():
            middle = statistics.median(rates)
            print(
                f"{count:>10}{middle:>10.1f}{min(rates):>10.1f}{max(rates):>10.1f}"
                f"{speeds.scaling(count):>10.3f}{middle / speeds.ideal / count:>10.3f}"
            )
    for cost in costs:
        print(f"{f'{cost.steps} steps, {cost.concurrency} at once, ms a step':<44}" + "".join(f"{t:>9}" for t in TIMES))
        for name, row in cost.rows.items():
            print(f"    {name:<40}" + "".join(f"{row[t]:>9.3f}" for t in TIMES))


def main(argv: Sequence[str] | None = None) -> None:
    """Measure each stage in processes of its own and print."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--stages", nargs="+", default=["talker", "thinker"])
    arguments.add_argument("--replicas", nargs="+", type=int, default=[1, 2, 4], help="numbers to compare, 1 first")
    arguments.add_argument("--step", type=float, default=0.05, help="seconds of a step")
    arguments.add_argument("--length", type=int, default=40, help="tokens or frames of a request")
    arguments.add_argument("--seconds", type=float, default=10.0, help="measured time of a round; 0: no throughput")
    arguments.add_argument("--rounds", type=int, default=3, help="measured rounds of each number of replicas")
    arguments.add_argument("--concurrency", nargs="+", type=int, default=[1, 4], help="requests at once, for overhead")
    arguments.add_argument("--turns", type=int, default=10, help="measured turns of each client; 0: no overhead")
    arguments.add_argument("--json", type=Path, help="write the figures here too")
    args = arguments.parse_args(argv)
    activate()
    figures = {}
    with checkpoint(args.model) as model:
        for stage in args.stages:
            busy = {"replicas": max(args.replicas), "max_num_seqs": SLOTS, **engine(args.step)}
            plan = from_kwargs(model, max_model_len=1024, stage_overrides={stage: busy})
            with deployed(plan, clients=2) as deployment:
                speeds, costs = asyncio.run(measure(deployment, stage, args))
            show(stage, speeds, costs, args)
            figures[stage] = {
                "step_s": args.step,
                "rates": speeds and speeds.rates,
                "scaling": speeds and {count: speeds.scaling(count) for count in speeds.rates},
                "overhead_ms": {cost.concurrency: cost.rows for cost in costs},
            }
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
