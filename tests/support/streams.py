"""Hundreds of streams between processes, with aborts at random, while processes of both kinds are killed.

Streams run in waves, some at once, each between one of two producers and one of two consumers. In some waves a process
is killed while it has streams, and replaced. How a stream ends is known beforehand: nothing else is accepted.
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

WHOLE, LEFT, FAILED, DROPPED = "whole", "left", "ChunkFailed", "Forgotten"
"""How a stream ends: read to its end, given up by its reader, failed or forgotten by its writer."""

UNSAID = 3
"""Waves whose streams a consumer may not have told its producers to forget yet; who kills it has to do that."""

LOST = "ProducerLost"
WRITTEN = "written"
STATS = "stats"
SPARE_FILES = 8
"""Connections that were not there when somebody was first asked."""
LOOK_EVERY_S = 0.02

# -- in the processes ---------------------------------------------------------------------------------------------


def write(producer: Producer, request: str, fate: str, first: int, stop: int) -> str:
    """Put the chunks from `first` to before `stop`, and do with the stream what it is meant for."""
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
    """Read `count` chunks and forget the stream; how it ended."""
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
    """Do what the pipe says, many things at once; close the end and say which of its threads are left."""
    saying = threading.Lock()

    def say(*words: Any) -> None:
        with saying:
            pipe.send(words)

    def do(request: str, *told: Any) -> None:
        try:
            say(request, work(end, request, *told))
        except Exception as error:
            say(request, repr(error))

    with end, ThreadPoolExecutor(WAVE) as pool:
        while (command := pipe.recv()) is not None:
            if command == STATS:
                stats = end.stats()
                say(STATS, (stats.requests, stats.chunks, stats.held_bytes), len(os.listdir("/proc/self/fd")))
            else:
                pool.submit(do, *command)
    say([thread.name for thread in threading.enumerate() if thread.name.startswith("omni-")])


def producing(config: ConnectorConfig, pipe: Any) -> None:
    """A producer's process: says its address first."""
    producer = connector(config).producer(EDGE)
    pipe.send(producer.address)
    serve(pipe, producer, write)


def consuming(config: ConnectorConfig, pipe: Any) -> None:
    """A consumer's process."""
    serve(pipe, connector(config).consumer(EDGE), read)


# -- in the test --------------------------------------------------------------------------------------------------


class End:
    """A process at one end of the edge."""

    def __init__(self, config: ConnectorConfig, target: Callable[[ConnectorConfig, Any], None]) -> None:
        self._config, self._target = config, target
        self._start()

    def _start(self) -> None:
        self.child = Child(self._target, self._config)
        self.address = self.child.receive() if self._target is producing else ""
        self.files: int | None = None

    def tell(self, *told: Any) -> None:
        """Have something done."""
        self.child.pipe.send(told)

    def replace(self) -> None:
        """After it was killed."""
        self.child.process.join(PATIENCE_S)
        self.child.pipe.close()
        self._start()

    def left(self, *, files: bool) -> str:
        """What it holds, or with `files` those it has open beyond those of when it was first asked; empty: nothing."""
        self.child.pipe.send(STATS)
        _, held, now = self.child.receive()
        self.files = now + SPARE_FILES if self.files is None else self.files
        if held != (0, 0, 0):
            return "{} requests, {} chunks, {} bytes".format(*held)
        return f"{now - self.files} files" if files and now > self.files else ""

    def end(self) -> list[str]:
        """Let it end; the threads that were left."""
        self.child.pipe.send(None)
        (left,) = self.child.receive()
        self.child.process.join(PATIENCE_S)
        assert self.child.process.exitcode == 0
        return left


@dataclass
class Stream:
    """One stream: what it is meant for, who writes and who reads it, and how many chunks are read."""

    name: str
    fate: str
    writer: End
    reader: End
    count: int

    def ends(self, victim: End | None) -> set[str]:
        """How it may end for its reader. Only streams that wait for a victim's last chunk are certain to lose it."""
        if victim is not self.writer:
            return {self.fate}
        return {LOST} if self.fate == WHOLE else {LOST, self.fate}


@dataclass
class Storm:
    """Two producers, two consumers and all streams.

    Attributes:
        streams: how many; a multiple of `WAVE`.
        keeps_files: a library keeps connections as long as the process lives.
        seen: counts how streams ended, processes that were killed, and streams that a consumer took over.
    """

    config: ConnectorConfig
    streams: int
    keeps_files: bool = False
    seed: int = 0
    seen: Counter[str] = field(default_factory=Counter)

    def run(self) -> None:
        """All waves, then everything must be gone."""
        self._random = random.Random(self.seed)
        self._producers = [End(self.config, producing) for _ in range(2)]
        self._consumers = [End(self.config, consuming) for _ in range(2)]
        self._lately: deque[Stream] = deque(maxlen=UNSAID * WAVE)
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
        """Everything has happened, more than once."""
        ways = {how: self.seen[how] for how in (WHOLE, LEFT, FAILED, DROPPED, LOST)}
        assert sum(ways.values()) == self.streams and min(ways.values()) > 1, self.seen
        assert self.seen["killed"] > 1 and self.seen["taken over"] > 1, self.seen

    def _stream(self, name: str) -> Stream:
        fate = self._random.choices((WHOLE, LEFT, FAILED, DROPPED), (5, 3, 1, 1))[0]
        count = self._random.randrange(CHUNKS) if fate == LEFT else CHUNKS
        return Stream(name, fate, self._random.choice(self._producers), self._random.choice(self._consumers), count)

    def _wave(self, streams: list[Stream]) -> None:
        victim = None
        if self._random.random() < KILLING:
            victim = self._random.choice((*self._producers, *self._consumers))
        self._due = Counter[tuple[End, str]]()
        self._ended: dict[str, str] = {}
        for stream in streams:
            self._tell(stream.reader, stream.name, stream.writer.address, stream.fate, stream.count)
            # Who is to read to the end gets the last chunk when the victim is dead; who is not to, never.
            complete = stream.fate == LEFT or (stream.fate == WHOLE and victim is None)
            self._tell(stream.writer, stream.name, stream.fate, 0, CHUNKS if complete else CHUNKS - 1)
        if victim is not None:
            enough = self._random.randint(0, sum(stream.fate != WHOLE for stream in streams))
            self._hear(lambda: len(self._ended) >= enough)
            self._kill(victim, streams)
        self._hear(lambda: not self._due)
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
        self._hear(lambda: not any(end in writers for end, _ in self._due))
        for stream in self._lately:
            if stream.reader is victim and stream.writer is not victim:
                self._tell(stream.writer, stream.name, DROPPED, 0, 0)
        for stream in streams:
            if stream.writer is not victim and stream.fate == WHOLE:
                self._tell(stream.writer, stream.name, stream.fate, CHUNKS - 1, CHUNKS)
                if stream.reader is victim:  # who follows finds everything
                    self._tell(victim, stream.name, stream.writer.address, stream.fate, CHUNKS)
                    self.seen["taken over"] += 1
            elif stream.reader is victim:
                self._tell(stream.writer, stream.name, DROPPED, 0, 0)
                self._ended.setdefault(stream.name, stream.fate)

    def _tell(self, end: End, name: str, *told: Any) -> None:
        self._due[end, name] += 1
        end.tell(name, *told)

    def _hear(self, enough: Callable[[], bool]) -> None:
        """Take answers until there are enough."""
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
