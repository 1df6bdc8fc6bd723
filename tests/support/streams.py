"""Streams between processes in waves, with aborts at random, while processes of both sides are killed and replaced.

The end of each stream is known beforehand: no other is accepted.
"""

from __future__ import annotations

import multiprocessing.connection
import os
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from vllm_omni_ext.connectors.base import ConnectorConfig, ConnectorError, Consumer, Forgotten, Producer
from vllm_omni_ext.connectors.conformance import EDGE, PATIENCE_S, Child, key
from vllm_omni_ext.connectors.registry import connector

WAVE, CHUNKS = 20, 4
KILLING = 0.4
"""Part of the waves in which a process is killed."""

WHOLE, LEFT, FAILED, DROPPED, LOST = "whole", "left", "ChunkFailed", "Forgotten", "ProducerLost"
"""Ends of a stream: read to its end, forgotten by its reader, failed or forgotten by its writer, its writer killed."""

UNSENT = 3
"""Waves whose streams a killed consumer may not have forgotten at its producers: the test does so in its place."""

WRITTEN, STATS = "written", "stats"
SPARE_FILES = 8
"""Connections that a process may open after its files were counted first."""
LOOK_EVERY_S = 0.02


def write(producer: Producer, request: str, fate: str, first: int, stop: int) -> str:
    """Put the chunks from `first` to before `stop`, then end the stream as planned."""
    try:
        for index in range(first, stop):
            producer.put(key(request, index), [torch.full((50, 64), float(index))], last=index == CHUNKS - 1)
        if fate == FAILED:
            producer.fail(request, "as planned")
        elif fate == DROPPED:
            producer.forget(request)
    except Forgotten:
        assert fate == LEFT
    return WRITTEN


def read(consumer: Consumer, request: str, source: str, fate: str, count: int) -> str:
    """Read `count` chunks and forget the stream; returns its end."""
    consumer.open(request, source)
    try:
        for index in range(count):
            part = consumer.get(key(request, index), PATIENCE_S).parts[0]
            assert torch.equal(part, torch.full((50, 64), float(index)))
    except ConnectorError as error:
        return type(error).__name__
    finally:
        consumer.forget(request)
    return WHOLE if count == CHUNKS else LEFT


def serve(pipe: Any, end: Producer | Consumer, work: Callable[..., str]) -> None:
    """Work on the commands of the pipe, many at once; then close the end and send the names of the threads left."""
    sending = threading.Lock()

    def send(*words: Any) -> None:
        with sending:
            pipe.send(words)

    def do(request: str, *told: Any) -> None:
        try:
            send(request, work(end, request, *told))
        except Exception as error:
            send(request, repr(error))

    with end, ThreadPoolExecutor(WAVE) as pool:
        while (command := pipe.recv()) is not None:
            if command == STATS:
                stats = end.stats()
                send(STATS, (stats.requests, stats.chunks, stats.held_bytes), len(os.listdir("/proc/self/fd")))
            else:
                pool.submit(do, *command)
    send([thread.name for thread in threading.enumerate() if thread.name.startswith("omni-")])


def producing(config: ConnectorConfig, pipe: Any) -> None:
    """A producer's process: sends its address first."""
    producer = connector(config).producer(EDGE)
    pipe.send(producer.address)
    serve(pipe, producer, write)


def consuming(config: ConnectorConfig, pipe: Any) -> None:
    serve(pipe, connector(config).consumer(EDGE), read)


class End:
    """A process at one end of the edge."""

    def __init__(self, config: ConnectorConfig, target: Callable[[ConnectorConfig, Any], None]) -> None:
        self._config, self._target = config, target
        self._start()

    def _start(self) -> None:
        self.child = Child(self._target, self._config)
        self.address = self.child.receive() if self._target is producing else ""
        self.files: int | None = None

    def replace(self) -> None:
        """Start the process again that was killed."""
        self.child.process.join(PATIENCE_S)
        self.child.pipe.close()
        self._start()

    def left(self, *, files: bool) -> str:
        """The data it holds, or with `files` the number of files opened since the first call; empty: none."""
        self.child.pipe.send(STATS)
        _, held, now = self.child.receive()
        self.files = now + SPARE_FILES if self.files is None else self.files
        if held != (0, 0, 0):
            return "{} requests, {} chunks, {} bytes".format(*held)
        return f"{now - self.files} files" if files and now > self.files else ""

    def end(self) -> list[str]:
        """Let it end; returns the names of the threads left."""
        self.child.pipe.send(None)
        (left,) = self.child.receive()
        self.child.process.join(PATIENCE_S)
        assert self.child.process.exitcode == 0
        return left


@dataclass
class Stream:
    """One stream: its planned end, its writer and reader, and how many chunks are read."""

    name: str
    fate: str
    writer: End
    reader: End
    count: int

    def ends(self, victim: End | None) -> set[str]:
        """Its possible ends. Only streams that wait for the last chunk of a killed writer are certain to lose it."""
        if victim is not self.writer:
            return {self.fate}
        return {LOST} if self.fate == WHOLE else {LOST, self.fate}


@dataclass
class Storm:
    """Two producers, two consumers and `streams` streams, a multiple of `WAVE`.

    Attributes:
        keeps_files: the library keeps connections as long as the process lives.
        seen: counts the ends of streams, processes killed, and streams that a new consumer took over.
    """

    config: ConnectorConfig
    streams: int
    keeps_files: bool = False
    seed: int = 0
    seen: Counter[str] = field(default_factory=Counter)

    def run(self) -> None:
        self._random = random.Random(self.seed)
        self._producers = [End(self.config, producing) for _ in range(2)]
        self._consumers = [End(self.config, consuming) for _ in range(2)]
        self._lately: deque[Stream] = deque(maxlen=UNSENT * WAVE)
        everybody = (*self._producers, *self._consumers)
        try:
            for first in range(0, self.streams, WAVE):
                self._wave([self._stream(f"r{number}") for number in range(first, first + WAVE)])
                for end in everybody if first % (10 * WAVE) == 0 else ():
                    self._settle(end)
            for end in everybody:
                self._settle(end)
            assert [end.end() for end in everybody] == [[]] * len(everybody), "threads are left"
            self._check_seen()
        finally:
            for end in everybody:
                end.child.kill()

    def _check_seen(self) -> None:
        """Every end and every kind of kill has happened more than once."""
        ends = [self.seen[end] for end in (WHOLE, LEFT, FAILED, DROPPED, LOST)]
        assert sum(ends) == self.streams and min(ends) > 1, self.seen
        assert self.seen["killed"] > 1 and self.seen["taken over"] > 1, self.seen

    def _stream(self, name: str) -> Stream:
        fate = self._random.choices((WHOLE, LEFT, FAILED, DROPPED), (5, 3, 1, 1))[0]
        count = self._random.randrange(CHUNKS) if fate == LEFT else CHUNKS
        return Stream(name, fate, self._random.choice(self._producers), self._random.choice(self._consumers), count)

    def _wave(self, streams: list[Stream]) -> None:
        everybody = (*self._producers, *self._consumers)
        victim = self._random.choice(everybody) if self._random.random() < KILLING else None
        self._due = Counter[tuple[End, str]]()
        self._ended: dict[str, str] = {}
        for stream in streams:
            self._send(stream.reader, stream.name, stream.writer.address, stream.fate, stream.count)
            # A stream that is read to its end gets the last chunk when the victim is dead; the others never.
            complete = stream.fate == LEFT or (stream.fate == WHOLE and victim is None)
            self._send(stream.writer, stream.name, stream.fate, 0, CHUNKS if complete else CHUNKS - 1)
        if victim is not None:
            enough = self._random.randint(0, sum(stream.fate != WHOLE for stream in streams))
            self._receive(lambda: len(self._ended) >= enough)
            self._kill(victim, streams)
        self._receive(lambda: not self._due)
        for stream in streams:
            ended = self._ended[stream.name]
            assert ended in stream.ends(victim), f"{stream.name} was to be {stream.fate} and ended {ended}"
            self.seen[ended] += 1
        self._lately.extend(streams)

    def _kill(self, victim: End, streams: list[Stream]) -> None:
        victim.child.kill()
        victim.replace()
        self.seen["killed"] += 1
        for at in [at for at in self._due if at[0] is victim]:
            del self._due[at]
        writers = {stream.writer for stream in streams} - {victim}
        self._receive(lambda: not any(end in writers for end, _ in self._due))
        for stream in self._lately:
            if stream.reader is victim and stream.writer is not victim:
                self._send(stream.writer, stream.name, DROPPED, 0, 0)
        for stream in streams:
            if stream.writer is not victim and stream.fate == WHOLE:
                self._send(stream.writer, stream.name, stream.fate, CHUNKS - 1, CHUNKS)
                if stream.reader is victim:  # the new consumer gets every chunk
                    self._send(victim, stream.name, stream.writer.address, stream.fate, CHUNKS)
                    self.seen["taken over"] += 1
            elif stream.reader is victim:
                self._send(stream.writer, stream.name, DROPPED, 0, 0)
                self._ended.setdefault(stream.name, stream.fate)

    def _send(self, end: End, name: str, *told: Any) -> None:
        self._due[end, name] += 1
        end.child.pipe.send((name, *told))

    def _receive(self, enough: Callable[[], bool]) -> None:
        """Receive answers until there are enough."""
        ends = {end.child.pipe: end for end in (*self._producers, *self._consumers)}
        while not enough():
            ready = multiprocessing.connection.wait(ends, PATIENCE_S)
            assert ready, f"stuck: {sorted(name for _, name in self._due)}"
            for end in (ends[pipe] for pipe in ready):
                name, how = end.child.pipe.recv()
                self._due[end, name] -= 1
                self._due += Counter()  # without those that have answered
                if end in self._consumers:
                    self._ended[name] = how
                else:
                    assert how == WRITTEN, f"{name}: {how}"

    def _settle(self, end: End) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while left := end.left(files=not self.keeps_files):
            assert time.monotonic() < deadline, f"left of the streams: {left}"
            time.sleep(LOOK_EVERY_S)
