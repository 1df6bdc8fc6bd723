"""Requests in waves between processes, some forgotten while they are read, while processes are killed and replaced."""

from __future__ import annotations

import os
import random
import threading
from collections import Counter
from typing import Any

import pytest
import torch

from vllm_omni_ext.connectors.base import MIB, ConnectorConfig, ConnectorError
from vllm_omni_ext.connectors.conformance import EDGE, PATIENCE_S, Child, consume, eventually
from vllm_omni_ext.connectors.registry import connector

WAVES, WAVE, CHUNKS, ROWS = 30, 20, 4, 3000
KILLING = 0.4
"""Part of the waves in which a process is killed."""

PUT, FORGET, HELD = "put", "forget", "held"
WHOLE, GONE, LOST = "whole", "Forgotten", "ProducerLost"
"""Ends of a request for its reader."""


def chunk(number: int, index: int) -> torch.Tensor:
    return torch.full((ROWS,), float(number * CHUNKS + index))


def producing(config: ConnectorConfig, pipe: Any) -> None:
    """A producer's process: sends its address first, and the names of its threads last."""
    with connector(config).producer(EDGE) as producer:
        pipe.send(producer.address)
        while (command := pipe.recv()) is not None:
            what, numbers = command
            for number in numbers:
                if what == FORGET:
                    producer.forget(str(number))
                for index in range(CHUNKS if what == PUT else 0):
                    producer.put(str(number), index, chunk(number, index))
            stats = producer.stats()
            pipe.send((stats.requests, stats.held_bytes))
    pipe.send([thread.name for thread in threading.enumerate() if thread.name.startswith("omni-")])


def consuming(config: ConnectorConfig, pipe: Any) -> None:
    """A consumer's process: reads requests and sends their ends; at last the names of its threads."""
    with connector(config).consumer(EDGE) as consumer:
        while (command := pipe.recv()) is not None:
            ends = {}
            for number, source in command:
                try:
                    for index in range(CHUNKS):
                        got = consumer.get(source, str(number), index, PATIENCE_S)
                        assert torch.equal(got, chunk(number, index)), f"{number}/{index} has other bytes"
                    ends[number] = WHOLE
                except ConnectorError as error:
                    ends[number] = type(error).__name__
                consumer.forget(source, str(number))
            pipe.send(ends)
    pipe.send([thread.name for thread in threading.enumerate() if thread.name.startswith("omni-")])


class Storm:
    """Two producers, two consumers, and `WAVES` waves of requests."""

    def __init__(self, config: ConnectorConfig) -> None:
        self._config = config
        self._random = random.Random(0)
        self.seen = Counter[str]()

    def run(self) -> None:
        self._producers = [self._producer() for _ in range(2)]
        self._consumers = [Child(consuming, self._config) for _ in range(2)]
        try:
            for wave in range(WAVES):
                self._wave(range(wave * WAVE, (wave + 1) * WAVE))
            for producer, _ in self._producers:
                eventually(lambda producer=producer: self._told(producer, HELD) == (0, 0), "requests are left")
            for each in (*(producer for producer, _ in self._producers), *self._consumers):
                each.pipe.send(None)
                assert each.receive() == [], "threads are left"
        finally:
            for each in (*(producer for producer, _ in self._producers), *self._consumers):
                each.kill()
        assert self.seen[WHOLE] > WAVES * WAVE / 2 and self.seen[GONE] and self.seen[LOST]

    def _producer(self) -> tuple[Child, str]:
        made = Child(producing, self._config)
        return made, made.receive()

    @staticmethod
    def _told(producer: Child, what: str, numbers: list[int] | None = None) -> Any:
        producer.pipe.send((what, numbers or []))
        return producer.receive()

    def _wave(self, numbers: range) -> None:
        """Of each producer's requests, some are forgotten while they are read, and others use their memory."""
        written = {number: number % 2 for number in numbers}
        dropped = {number for number in numbers if self._random.random() < 0.3}
        for which, (producer, _) in enumerate(self._producers):
            self._told(producer, PUT, [number for number in numbers if written[number] == which])
        sources = {number: self._producers[which][1] for number, which in written.items()}
        read = [[n for n in numbers if n // 2 % 2 == reader] for reader in range(2)]
        for consumer, mine in zip(self._consumers, read, strict=True):
            consumer.pipe.send([(number, sources[number]) for number in mine])
        killed = self._random.choice(["producer", "consumer"]) if self._random.random() < KILLING else None
        victim = self._random.randrange(2)
        for which, (producer, _) in enumerate(self._producers):
            if killed == "producer" and which == victim:
                producer.kill()
                self._producers[which] = self._producer()
                continue
            self._told(producer, FORGET, [number for number in dropped if written[number] == which])
            fresh = [number + 10**6 for number in dropped]
            self._told(producer, PUT, fresh)
            self._told(producer, FORGET, fresh)
        if killed == "consumer":
            self._consumers[victim].kill()
            self._consumers[victim] = Child(consuming, self._config)
            self._consumers[victim].pipe.send([(number, sources[number]) for number in read[victim]])
        for reader, (consumer, mine) in enumerate(zip(self._consumers, read, strict=True)):
            ends = consumer.receive()
            assert ends.keys() == set(mine)
            for number, end in ends.items():
                possible = {WHOLE}
                if number in dropped or (killed == "consumer" and reader == victim):  # read and forgotten before
                    possible.add(GONE)
                if killed == "producer" and written[number] == victim:
                    possible.add(LOST)
                assert end in possible, f"{number}: {end}, possible are {possible}"
                self.seen[end] += 1


def shared() -> set[str]:
    """Return the names in /dev/shm, except Python's own `psm_`."""
    return {entry for entry in os.listdir("/dev/shm") if not entry.startswith("psm_")}


@pytest.mark.engine
@pytest.mark.parametrize("name", ["shared_memory", "tcp"])
def test_each_request_is_read_whole_or_was_forgotten_or_is_lost_with_its_producer(name: str) -> None:
    config = ConnectorConfig(name=name, capacity_bytes=4 * MIB)
    with Child(consume, config):  # the server that forks the tests' processes has files of its own
        before = shared()
    Storm(config).run()
    assert shared() == before
