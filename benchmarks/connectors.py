"""Measures a chunk on each connector between two processes, and a plain copy of as many bytes in the same run.

`put` is the time of the producer's thread. `there` is the time from the beginning of the put until the consumer has the
tensor, including a message through a pipe that announces it. CPU time and context switches are of both processes. The
copies are by construction (see the modules).

The second table has the system calls of both processes, counted by strace, for chunks that are read one by one, with
their announcements. `naming` are calls that make, open or remove something in a file system, or make memory that is a
file.

    python benchmarks/connectors.py [--connectors shared_memory tcp mooncake] [--seconds 2]

Mooncake's engine listens on all interfaces: run it alone, in a network namespace with only loopback.

    unshare -rn sh -c 'ip link set lo up; python benchmarks/connectors.py --connectors mooncake'
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import syscalls
import torch

from vllm_omni_ext.connectors.base import MIB, ConnectorConfig, Consumer
from vllm_omni_ext.connectors.registry import connector

SIZES = (4096, MIB, 64 * MIB)
EDGE = "hidden_states"
FEWEST, TIMEOUT_S = 5, 60.0
COUNTED, APART_S = 200, 0.01
"""Chunks whose system calls are counted, and the seconds between them, so that each wakes its reader."""

COPIES = {
    "shared_memory": "1 + 1",
    "tcp": "0 + 1, kernel 1 + 1",
    "mooncake": "1 + 1, and the engine's",
}
"""Copies of the tensor's bytes, at the producer + at the consumer."""


def usage() -> tuple[float, int]:
    """Return (CPU seconds, context switches) of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime, used.ru_nvcsw + used.ru_nivcsw


def read(consumer: Consumer, pipe: Any) -> None:
    """Read each chunk that the producer announces in the pipe, until it announces None (the consumer's process).

    For each chunk, send (arrival time on the clock that all processes share, number of elements), then `usage()`.
    """
    while (told := pipe.recv()) is not None:
        request, source = told
        numel = consumer.get(source, request, 0, TIMEOUT_S).numel()
        pipe.send((time.perf_counter(), numel))
        consumer.forget(source, request)
        pipe.send(usage())


def reader(config: ConnectorConfig, pipe: Any, work: Callable[[Consumer, Any], None]) -> None:
    """Open a consumer and pass it to `work`; runs in the consumer's process."""
    with connector(config).consumer(EDGE) as consumer:
        work(consumer, pipe)


def reading(config: ConnectorConfig, work: Callable[[Consumer, Any], None]) -> tuple[Any, Any]:
    """Start a process that runs `work` with a consumer; return (pipe to the process, process)."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    other = spawn.Process(target=reader, args=(config, theirs, work))
    other.start()
    return ours, other


def measure(name: str, size: int, seconds: float) -> str:
    """Measure chunks of `size` bytes on a connector for `seconds`; return a line of the first table."""
    config = ConnectorConfig(name=name, capacity_bytes=2 * SIZES[-1])
    ours, other = reading(config, read)
    puts, theres = [], []
    with connector(config).producer(EDGE) as producer:
        tensor = torch.ones(size, dtype=torch.uint8)
        cpu: list[tuple[float, int]] = []
        end, count = 0.0, 0
        while count < FEWEST + 1 or time.perf_counter() < end:
            request = f"r{count}"
            start = time.perf_counter()
            producer.put(request, 0, tensor)
            put = time.perf_counter()
            ours.send((request, producer.address))
            arrived, numel = ours.recv()
            assert numel == size
            total = [sum(both) for both in zip(usage(), ours.recv(), strict=True)]
            cpu.append((total[0], int(total[1])))
            if count:  # the first connects and touches memory for the first time
                puts.append(put - start)
                theres.append(arrived - start)
            else:
                end = time.perf_counter() + seconds
            count += 1
        ours.send(None)
        other.join()
        rounds = len(puts)
        busy = (cpu[-1][0] - cpu[0][0]) / rounds * 1e6
        switches = (cpu[-1][1] - cpu[0][1]) / rounds
    there = statistics.median(theres)
    return (
        f"{name:<15}{size:>10}{statistics.median(puts) * 1e6:>11.0f}{there * 1e6:>11.0f}{max(theres) * 1e6:>11.0f}"
        f"{size / there / 1e6:>10.0f}{busy:>11.0f}{switches:>9.1f}  {COPIES.get(name, '')}"
    )


def follow(consumer: Consumer, pipe: Any) -> None:
    """Read the chunks of one request when the producer announces them; runs in the consumer's process."""
    source = pipe.recv()
    for index in range(COUNTED + 1):
        pipe.recv()
        consumer.get(source, "r", index, TIMEOUT_S)
        if index in (0, COUNTED):
            pipe.send(None)
    pipe.recv()


def calls(name: str, size: int) -> str:
    """Count system calls for chunks of `size` bytes on a connector; return a line of the second table.

    The calls with which the producer pauses between chunks are left out.
    """
    config = ConnectorConfig(name=name, capacity_bytes=2 * COUNTED * size)
    ours, other = reading(config, follow)
    with connector(config).producer(EDGE) as producer:
        ours.send(producer.address)
        producer.put("r", 0, torch.ones(size, dtype=torch.uint8))
        ours.send(None)
        ours.recv()
        pids = {"producer": os.getpid()} | {"consumer": other.pid}
        with syscalls.counted(pids) as counts:
            for index in range(1, COUNTED + 1):
                producer.put("r", index, torch.ones(size, dtype=torch.uint8))
                ours.send(None)
                time.sleep(APART_S)
            ours.recv()
        ours.send(None)
        other.join()
    counts["producer"]["clock_nanosleep"] = 0
    both = sum(counts.values(), Counter[str]())
    naming = sum(both[call] for call in syscalls.NAMING)
    often = ", ".join(f"{call} {count / COUNTED:.1f}" for call, count in both.most_common(6))
    numbers = (counts.get(who, Counter()).total() / COUNTED for who in ("producer", "consumer"))
    return f"{name:<15}{size:>10}" + "".join(f"{number:>11.1f}" for number in numbers) + f"{naming:>9}  {often}"


def copy(size: int, seconds: float) -> str:
    """Return a line of the first table for a copy of `size` bytes into memory that was used before."""
    source, target, times = np.ones(size, np.uint8), np.ones(size, np.uint8), []
    end = time.perf_counter() + seconds
    while len(times) < FEWEST or time.perf_counter() < end:
        start = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - start)
    middle = statistics.median(times)
    return f"{'copy':<15}{size:>10}{'':>11}{middle * 1e6:>11.0f}{max(times) * 1e6:>11.0f}{size / middle / 1e6:>10.0f}"


def main() -> None:
    """Run this benchmark from the command line, and print both tables."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--connectors", nargs="+", default=["shared_memory", "tcp"])
    flags.add_argument("--seconds", type=float, default=2.0, help="for each line")
    args = flags.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; medians, microseconds a chunk")
    head = f"{'':<15}{'bytes':>10}{'put':>11}{'there':>11}{'slowest':>11}{'MB/s':>10}{'CPU':>11}{'switches':>9}"
    print(f"{head}  copies")
    for size in SIZES:
        print(copy(size, args.seconds / 4), flush=True)
        for name in args.connectors:
            print(measure(name, size, args.seconds), flush=True)
    if not syscalls.available():
        print("system calls: strace is not installed")
        return
    print(f"\n{'system calls':<15}{'bytes':>10}{'producer':>11}{'consumer':>11}{'naming':>9}  most frequent, a chunk")
    for size in SIZES[:2]:
        for name in args.connectors:
            print(calls(name, size), flush=True)


if __name__ == "__main__":
    main()
