"""Measures throughput by number of replicas of a stage, and the cost of a step; device time is simulated.

Each step of one stage takes `--step` seconds. Its pool has 1, 2 or 4 open replicas. A closed loop sends twice as many
requests as the open replicas can run at once. The program counts the outputs of the stage. `step_cost.py` compares the
cost of a step with a bare vLLM client.

    python benchmarks/replicas.py [MODEL] [--stages talker thinker] [--step 0.05] [--rounds 3] [--json FILE]
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import time
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from checkpoint import checkpoint, parser
from simulated import engine
from stage_load import Step, Work, closed_loop, deployed, open_only, watch
from step_cost import MS, TIMES, Overhead, overhead
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.executor import Executor

from vllm_omni_ext.cli.settings import from_kwargs
from vllm_omni_ext.compat import activate
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.omni import AsyncOmni
from vllm_omni_ext.runtime.client.replica import addresses
from vllm_omni_ext.runtime.client.replica_connections import Connections
from vllm_omni_ext.runtime.launch.launcher import Deployment

SLOTS = 4
"""Requests a replica runs at once."""
QUEUE = 2
"""Concurrent requests of the closed loop for each slot, so that a request waits for each slot that becomes free."""
SETTLE_S = 1.5


@dataclass
class Throughput:
    """Throughput of a stage; an item is an output token, or an output of a pooling stage.

    Attributes:
        ideal: items a second of one replica whose steps follow each other without pauses.
        rates: items a second in each round, by number of open replicas.
    """

    ideal: float
    rates: dict[int, list[float]] = field(default_factory=dict)

    def scaling(self, count: int) -> float:
        """Return the median rate divided by that of one replica."""
        return statistics.median(self.rates[count]) / statistics.median(self.rates[1])


async def throughput(work: Work, steps: dict[ReplicaId, list[Step]], args: Any) -> Throughput:
    """Measure the throughput of all rounds, with 1, 2, 4 open replicas, then 4, 2, 1, and so on.

    Args:
        steps: the steps of each replica so far, as from `stage_load.watch`.
    """
    result = Throughput(SLOTS / args.step, {count: [] for count in args.replicas})
    counts = list(args.replicas)
    for _ in range(args.rounds):
        for count in counts:
            result.rates[count].append(await rate(work, count, steps, args.seconds))
        counts.reverse()
    return result


async def rate(work: Work, count: int, steps: dict[ReplicaId, list[Step]], seconds: float) -> float:
    """Return the items a second of the stage with `count` open replicas."""
    open_only(work, count)
    async with closed_loop(work, QUEUE * SLOTS * count):
        await asyncio.sleep(SETTLE_S)
        began = time.monotonic()
        await asyncio.sleep(seconds)
        ended = time.monotonic()
    await work.over()
    return sum(step.items for each in steps.values() for step in each if began <= step.made < ended) / (ended - began)


def share_out_cores(deployment: Deployment, stage: str) -> None:
    """Pin this process and the measured stage to the first core, and all other stages to the last core.

    With a GPU, the other stages would not use the first core either. While the bare client is measured, the other
    stages are idle.
    """
    cores = sorted(os.sched_getaffinity(0))
    places = {os.getpid(): cores[0]}
    for replica, process in deployment.processes().items():
        places[process.pid] = cores[0] if replica.stage == stage else cores[-1]
    for pid, core in places.items():
        for thread in psutil.Process(pid).threads():
            os.sched_setaffinity(thread.id, {core})


def bare_client(connections: Connections, replica: ReplicaId) -> AsyncMPClient:
    """Return vLLM's own client, connected to a replica as a second API server."""
    config = deepcopy(connections.configs[replica.stage])
    return AsyncMPClient(
        config,
        Executor.get_class(config),
        log_stats=False,
        client_addresses=addresses(connections.listeners[replica]),
        client_count=connections.client_count,
        client_index=connections.client_index,
    )


async def measure(deployment: Any, stage: str, args: Any) -> tuple[Throughput | None, list[Overhead]]:
    """Measure one stage; return (throughput or None, overhead of a step for each number of concurrent requests)."""
    omni = AsyncOmni(deployment.connections(0))
    first = ReplicaId(stage, 0)
    bare = bare_client(deployment.connections(1), first)
    try:
        work = Work(omni, stage, args.length)
        steps = {
            replica.id: watch(replica)
            for replica in omni.replica_connections.replicas.values()
            if replica.id.stage == stage
        }
        await work()
        speeds = await throughput(work, steps, args) if args.seconds else None
        costs = [await overhead(work, bare, steps[first], c, args.turns) for c in args.concurrency if args.turns]
        return speeds, costs
    finally:
        bare.shutdown(timeout=0)
        omni.shutdown(timeout=0)


def show(stage: str, speeds: Throughput | None, costs: list[Overhead], args: Any) -> None:
    """Print a table with the throughput of a stage, and one with the cost of its steps."""
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
    """Measure each stage with a new deployment, and print the results."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--stages", nargs="+", default=["talker", "thinker"])
    arguments.add_argument("--replicas", nargs="+", type=int, default=[1, 2, 4], help="numbers to compare, 1 first")
    arguments.add_argument("--step", type=float, default=0.05, help="seconds of a step")
    arguments.add_argument("--length", type=int, default=40, help="tokens or frames of a request")
    arguments.add_argument("--seconds", type=float, default=10.0, help="measured time of a round; 0: no throughput")
    arguments.add_argument("--rounds", type=int, default=3, help="measured rounds of each number of replicas")
    arguments.add_argument("--concurrency", nargs="+", type=int, default=[1, 4], help="requests at once, for overhead")
    arguments.add_argument("--turns", type=int, default=10, help="measured turns of each client; 0: no overhead")
    arguments.add_argument("--apart", action="store_true", help="other stages compute on another core")
    arguments.add_argument("--json", type=Path, help="write the figures here too")
    args = arguments.parse_args(argv)
    activate()
    figures = {}
    with checkpoint(args.model) as model:
        for stage in args.stages:
            busy = {"replicas": max(args.replicas), "max_num_seqs": SLOTS, **engine(args.step)}
            plan = from_kwargs(model, max_model_len=1024, stage_overrides={stage: busy})
            with deployed(plan, clients=2) as deployment:
                if args.apart:
                    share_out_cores(deployment, stage)
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
