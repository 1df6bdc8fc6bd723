"""How evenly each policy spreads requests, and what a decision costs. Virtual time; needs no engine.

Requests arrive at random at `--rate` and take an exponential time; each of `--clients` API servers has a pool of its
own over the same replicas and decides for its share. Each replica reports every `--interval`, at a time of its own; the
coordinator publishes all reports every 0.1 s. Load is what a replica really has: mean and largest over the replicas,
averaged over time.

    python benchmarks/balance.py [--replicas 1000] [--rate 1000] [--clients 4] [--service 5] [--seconds 30]
"""

from __future__ import annotations

import argparse
import heapq
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from vllm_omni_ext.coordinator.timing import PUBLISH_GAP_S
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.pool.load import Load
from vllm_omni_ext.pool.policies import POLICIES, policy
from vllm_omni_ext.pool.stage_pool import StagePool


@dataclass
class Result:
    """What was seen of one policy. Times in seconds of real time."""

    decisions: int = 0
    deciding: float = 0.0
    publications: int = 0
    publishing: float = 0.0
    largest: list[int] = field(default_factory=list)
    mean: list[float] = field(default_factory=list)


def arrivals(args: argparse.Namespace, rng: random.Random) -> Iterator[tuple[float, float]]:
    """(arrival, duration) of each request, in seconds of virtual time."""
    now = 0.0
    while now < args.seconds:
        now += rng.expovariate(args.rate)
        yield now, rng.expovariate(1 / args.service)


def simulate(name: str, args: argparse.Namespace) -> Result:
    """Run all requests through pools with one policy."""
    rng = random.Random(args.seed)
    replicas = [ReplicaId("talker", index) for index in range(args.replicas)]
    pools = [StagePool("talker", replicas, policy(name, at), clients=args.clients) for at in range(args.clients)]
    load = dict.fromkeys(replicas, 0)
    ends: list[tuple[float, str, ReplicaId, int]] = []
    reports = dict.fromkeys(replicas, Load())
    result, publication = Result(), PUBLISH_GAP_S
    for number, (now, duration) in enumerate(arrivals(args, rng)):
        while ends and ends[0][0] <= now:
            _, request, replica, at = heapq.heappop(ends)
            pools[at].release(request)
            load[replica] -= 1
        if now >= publication:
            publication += PUBLISH_GAP_S
            report(reports, load, turns=round(args.interval / PUBLISH_GAP_S), turn=len(result.mean))
            publish(pools, reports, result)
            result.largest.append(max(load.values()))
            result.mean.append(sum(load.values()) / len(load))
        client = rng.randrange(args.clients)
        start = time.perf_counter()
        replica = pools[client].admit(str(number))
        result.deciding += time.perf_counter() - start
        result.decisions += 1
        load[replica] += 1
        heapq.heappush(ends, (now + duration, str(number), replica, client))
    return result


def report(reports: dict[ReplicaId, Load], load: dict[ReplicaId, int], *, turns: int, turn: int) -> None:
    """Renew the reports of the replicas whose turn it is."""
    for replica, queue in load.items():
        if replica.index % turns == turn % turns:
            reports[replica] = Load(running=queue, report=turn)


def publish(pools: list[StagePool], reports: dict[ReplicaId, Load], result: Result) -> None:
    """Tell all pools what the replicas have reported."""
    start = time.perf_counter()
    for pool in pools:
        pool.publish(reports)
    result.publishing += time.perf_counter() - start
    result.publications += len(pools)


def row(name: str, result: Result) -> str:
    """One line of the table; the first half of the time is for the system to fill up."""
    half = len(result.mean) // 2
    mean = sum(result.mean[half:]) / len(result.mean[half:])
    largest = sum(result.largest[half:]) / len(result.largest[half:])
    decision = result.deciding / result.decisions * 1e6
    publication = result.publishing / result.publications * 1e6
    return f"{name:<20}{mean:>8.2f}{largest:>9.2f}{largest / mean:>10.2f}{decision:>14.1f}{publication:>17.0f}"


def main() -> None:
    """Simulate every policy and print a table."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--replicas", type=int, default=1000)
    flags.add_argument("--rate", type=float, default=1000.0, help="requests a second, of all API servers")
    flags.add_argument("--clients", type=int, default=4, help="API servers")
    flags.add_argument("--service", type=float, default=5.0, help="mean time of a request in seconds")
    flags.add_argument("--interval", type=float, default=1.0, help="seconds between two reports")
    flags.add_argument("--seconds", type=float, default=30.0, help="virtual time")
    flags.add_argument("--seed", type=int, default=0)
    args = flags.parse_args()
    print(f"{args.replicas} replicas, {args.rate:g} requests/s, {args.clients} API servers, {args.service:g} s each")
    print(f"{'policy':<20}{'mean':>8}{'largest':>9}{'max/mean':>10}{'us/decision':>14}{'us/publication':>17}")
    for name in sorted(POLICIES):
        print(row(name, simulate(name, args)))


if __name__ == "__main__":
    main()
