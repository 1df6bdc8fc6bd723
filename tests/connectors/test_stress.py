"""A thousand streams with aborts at random, while producers are killed: nothing is left, nothing hangs."""

from __future__ import annotations

import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from vllm_omni_ext.connectors.base import ConnectorConfig, ConnectorError, Consumer
from vllm_omni_ext.connectors.conformance import EDGE, PATIENCE_S, Child, consume, empty, eventually, key, produce
from vllm_omni_ext.connectors.registry import connector

STREAMS = 1000
LANES = 4
CHUNKS = 4


class Lane:
    """A producer's process, killed and replaced now and then, and the streams that it is asked for."""

    def __init__(self, config: ConnectorConfig, consumer: Consumer, seed: int) -> None:
        self.config, self.consumer, self.random = config, consumer, random.Random(seed)
        self.ends = dict.fromkeys(("read", "aborted", "lost"), 0)

    def run(self, numbers: range) -> dict[str, int]:
        """Lead the streams through, one after the other."""
        writer = Child(produce, self.config)
        source = writer.hear()
        for number in numbers:
            kill = self.random.random() < 0.02
            self.ends[self.stream(f"r{number}", writer, source, kill=kill)] += 1
            if kill:
                writer.kill()
                writer = Child(produce, self.config)
                source = writer.hear()
        writer.kill()
        return self.ends

    def stream(self, name: str, writer: Child, source: str, *, kill: bool) -> str:
        """One stream; how it ended."""
        read = self.random.randint(0, CHUNKS)
        self.consumer.open(name, source)
        if kill and read % 2:
            writer.kill()
        else:
            writer.pipe.send((name, CHUNKS, 50))
            writer.hear()
            if kill:
                writer.kill()
        try:
            for index in range(read):
                value = self.consumer.get(key(name, index), PATIENCE_S).parts[0][0, 0].item()
                assert value == index
        except ConnectorError:
            assert kill
            return "lost"
        finally:
            self.consumer.forget(name)
        return "read" if read == CHUNKS else "aborted"


@pytest.mark.parametrize("name", ["shared_memory", "tcp"])
def test_a_thousand_streams(name: str) -> None:
    config = ConnectorConfig(name=name)
    threads = set(threading.enumerate())
    Child(consume, config).kill()
    before = {entry for entry in os.listdir("/dev/shm") if not entry.startswith("psm_")}
    with connector(config).consumer(EDGE) as consumer, ThreadPoolExecutor(LANES) as pool:
        each = STREAMS // LANES
        runs = [pool.submit(Lane(config, consumer, at).run, range(at * each, (at + 1) * each)) for at in range(LANES)]
        ends = [run.result(240) for run in runs]
        total = {how: sum(end[how] for end in ends) for how in ends[0]}
        assert sum(total.values()) == STREAMS and min(total.values()) > 0, total
        eventually(lambda: empty(consumer) and consumer.stats().links == 0, "something is left of a stream")
    assert {entry for entry in os.listdir("/dev/shm") if not entry.startswith("psm_")} == before
    assert {t.name for t in set(threading.enumerate()) - threads if t.name.startswith("omni-")} == set()
