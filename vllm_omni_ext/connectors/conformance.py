"""Public test suite for connectors. Needs pytest.

    from vllm_omni_ext.connectors.base import ConnectorConfig
    from vllm_omni_ext.connectors.conformance import Conformance

    class TestMine(Conformance):
        config = ConnectorConfig(name="my_package.my_module:MyConnector")

`config` must leave the limits at their defaults. Producers and consumers also run in processes, which are killed with
SIGKILL.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from vllm_omni_ext.connectors.base import (
    MIB,
    BackPressure,
    ConnectorConfig,
    ConnectorError,
    Consumer,
    DeadlinePassed,
    Forgotten,
    Producer,
    ProducerLost,
)
from vllm_omni_ext.connectors.registry import connector

EDGE = "hidden_states"
PATIENCE_S = 30.0
"""Timeout for events that must happen, also on a busy machine."""

NOTICED_S = 1.0
"""Longest time in which the end of a process or a deadline must be detected."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool)
SHAPES = ((3, 5), (), (0,), (4, 0, 2), (1, 1, 1, 7))


def tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor whose elements differ."""
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float32) % 251).to(dtype).view(shape)


def eventually(condition: Callable[[], bool], what: str) -> None:
    """Wait until a condition holds; AssertionError with the message `what` if it does not in time."""
    end = time.monotonic() + PATIENCE_S
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < end, what
        pause.wait(0.02)


def empty(producer: Producer) -> bool:
    """Return whether the producer holds no request and no memory."""
    stats = producer.stats()
    return (stats.requests, stats.held_bytes) == (0, 0)


def produce(config: ConnectorConfig, pipe: Any) -> None:
    """Body of a process with a producer: sends the producer's address, then executes commands from the pipe.

    For a command (request, count, rows), put `count` chunks of shape [rows, 64] and send the held bytes. None ends the
    process.
    """
    with connector(config).producer(EDGE) as producer:
        pipe.send(producer.address)
        while (command := pipe.recv()) is not None:
            request, count, rows = command
            for index in range(count):
                producer.put(request, index, torch.full((rows, 64), float(index)))
            pipe.send(producer.stats().held_bytes)


def consume(config: ConnectorConfig, pipe: Any) -> None:
    """Body of a process with a consumer, which executes commands from the pipe.

    For a command (request, source, count), read `count` chunks and send the list of their sums. None ends the process.
    """
    with connector(config).consumer(EDGE) as consumer:
        while (command := pipe.recv()) is not None:
            request, source, count = command
            pipe.send([consumer.get(source, request, i, PATIENCE_S).sum().item() for i in range(count)])


class Child:
    """A child process of the tests, which is killed at the end of a `with` block."""

    def __init__(self, target: Callable[[ConnectorConfig, Any], None], config: ConnectorConfig) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["vllm_omni_ext.connectors.conformance"])
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(config, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def receive(self) -> Any:
        """Return the next message of the process."""
        assert self.pipe.poll(PATIENCE_S), "the process sends nothing"
        return self.pipe.recv()

    def stop(self) -> None:
        """Stop the process with SIGSTOP; returns when all of its threads are stopped."""
        pid = self.process.pid or 0
        os.kill(pid, signal.SIGSTOP)
        threads = [*Path(f"/proc/{pid}/task").glob("*/stat")]
        eventually(lambda: {file.read_text().rpartition(") ")[2][0] for file in threads} == {"T"}, "it was not stopped")

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        self.process.kill()  # no error if it has ended
        self.process.join()
        self.pipe.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()


class Conformance:
    """The test suite. Subclasses set `config` to the connector under test.

    Attributes:
        large_bytes: size of the chunk in `test_a_large_chunk`.
    """

    config: ClassVar[ConnectorConfig]
    large_bytes: ClassVar[int] = 200 * MIB

    @pytest.fixture
    def ends(self) -> Iterator[tuple[Producer, Consumer]]:
        made = connector(self.config)
        with made.producer(EDGE) as producer, made.consumer(EDGE) as consumer:
            yield producer, consumer

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_tensors_arrive_as_they_were(self, ends: tuple[Producer, Consumer], dtype: torch.dtype) -> None:
        producer, consumer = ends
        chunks = [tensor(dtype, shape) for shape in SHAPES] + [tensor(dtype, (6, 8)).t()[1:5]]
        for index, sent in enumerate(chunks):
            producer.put("a", index, sent)
        for index in (*range(len(chunks)), 0):
            sent, got = chunks[index], consumer.get(producer.address, "a", index, PATIENCE_S)
            assert got.dtype == sent.dtype and got.shape == sent.shape and torch.equal(got, sent)

    def test_a_chunk_that_was_not_put_is_an_error(self, ends: tuple[Producer, Consumer]) -> None:
        producer, consumer = ends
        producer.put("a", 0, torch.ones(1))
        for request, index in (("a", 1), ("unknown", 0)):
            with pytest.raises(Forgotten):
                consumer.get(producer.address, request, index, PATIENCE_S)
        assert torch.equal(consumer.get(producer.address, "a", 0, PATIENCE_S), torch.ones(1))

    def test_the_consumer_forgets(self, ends: tuple[Producer, Consumer]) -> None:
        producer, consumer = ends
        producer.put("a", 0, torch.ones(1000))
        kept = consumer.get(producer.address, "a", 0, PATIENCE_S)
        consumer.forget(producer.address, "a")
        eventually(lambda: empty(producer), "something is left of a forgotten request")
        with pytest.raises(Forgotten):
            producer.put("a", 1, torch.ones(1000))
        with pytest.raises(Forgotten):
            consumer.get(producer.address, "a", 0, PATIENCE_S)
        producer.put("b", 0, torch.zeros(1000))
        assert torch.equal(kept, torch.ones(1000)), "a chunk that was read changed when its memory was used again"
        consumer.forget(producer.address, "b")
        eventually(lambda: empty(producer), "a request that was never read is not freed")

    def test_the_producer_forgets(self, ends: tuple[Producer, Consumer]) -> None:
        producer, consumer = ends
        producer.put("a", 0, torch.ones(1000))
        producer.forget("a")
        producer.forget("unknown")
        assert empty(producer)
        with pytest.raises(Forgotten):
            consumer.get(producer.address, "a", 0, PATIENCE_S)
        consumer.forget(producer.address, "a")

    def test_the_last_of_two_consumers_frees_a_request(self) -> None:
        made = connector(self.config)
        with made.producer(EDGE) as producer, made.consumer(EDGE) as one, made.consumer(EDGE) as two:
            producer.put("a", 0, torch.ones(3))
            for consumer in (one, two):
                assert torch.equal(consumer.get(producer.address, "a", 0, PATIENCE_S), torch.ones(3))
            one.forget(producer.address, "a")
            one.close()
            assert torch.equal(two.get(producer.address, "a", 0, PATIENCE_S), torch.ones(3))
            two.forget(producer.address, "a")
            eventually(lambda: empty(producer), "the last reader left something")

    def test_many_producers_and_consumers(self) -> None:
        made = connector(self.config)
        producers = [made.producer(EDGE) for _ in range(3)]

        def read(reader: int) -> bool:
            names = [f"r{number}" for number in range(reader, 60, 3)]
            good = True
            with made.consumer(EDGE) as consumer:
                for number, name in enumerate(names):
                    source = producers[number % 3].address
                    chunks = [consumer.get(source, name, index, PATIENCE_S) for index in range(4)]
                    good &= all(torch.equal(chunk, torch.full((9,), index)) for index, chunk in enumerate(chunks))
                    consumer.forget(source, name)
                eventually(lambda: not any(p.stats().requests for p in producers), "requests are left")
            return good

        for number in range(60):
            for index in range(4):
                producers[number // 3 % 3].put(f"r{number}", index, torch.full((9,), index))
        with ThreadPoolExecutor(3) as pool:
            assert all(pool.map(read, range(3)))
        for producer in producers:
            assert empty(producer)
            producer.close()

    def test_no_room_is_an_error_and_ends_when_a_request_is_forgotten(self) -> None:
        made = connector(replace(self.config, capacity_bytes=MIB))
        with made.producer(EDGE) as producer, made.consumer(EDGE) as consumer:
            with pytest.raises(ValueError, match="can never fit"):
                producer.put("a", 0, torch.zeros(2 * MIB, dtype=torch.uint8))
            for index in range(4):
                producer.put("a", index, torch.zeros(MIB // 4, dtype=torch.uint8))
            since = time.monotonic()
            with pytest.raises(BackPressure):
                producer.put("b", 0, torch.zeros(1, dtype=torch.uint8))
            assert time.monotonic() - since < NOTICED_S
            assert producer.stats().held_bytes <= MIB
            consumer.forget(producer.address, "a")
            eventually(lambda: empty(producer), "the room was not given back")
            producer.put("b", 0, torch.zeros(MIB, dtype=torch.uint8))

    def test_empty_chunks_need_room_too(self) -> None:
        made = connector(replace(self.config, capacity_bytes=4096))
        with made.producer(EDGE) as producer, pytest.raises(BackPressure):
            for index in range(10_000):
                producer.put("a", index, torch.empty(0))

    def test_an_abandoned_request_is_dropped(self) -> None:
        made = connector(replace(self.config, retention_s=0.5))
        with made.producer(EDGE) as producer, made.consumer(EDGE) as consumer:
            producer.put("abandoned", 0, torch.ones(5))
            time.sleep(0.6)
            producer.put("other", 0, torch.ones(5))
            assert producer.stats().requests == 1
            with pytest.raises(Forgotten):
                consumer.get(producer.address, "abandoned", 0, PATIENCE_S)

    def test_mistakes_of_the_caller(self, ends: tuple[Producer, Consumer]) -> None:
        producer, consumer = ends
        producer.put("a", 0, torch.ones(1))
        for request, index in (("a", 0), ("a", 2), ("", 0)):
            with pytest.raises(ValueError):
                producer.put(request, index, torch.ones(1))
        with pytest.raises(ValueError):
            consumer.get("nonsense", "a", 0, PATIENCE_S)

    def test_a_large_chunk(self, ends: tuple[Producer, Consumer]) -> None:
        producer, consumer = ends
        sent = torch.arange(self.large_bytes // 8)
        producer.put("a", 0, sent)
        assert torch.equal(consumer.get(producer.address, "a", 0, PATIENCE_S), sent)

    def test_a_producer_that_copies_does_not_need_the_tensor_any_more(self, ends: tuple[Producer, Consumer]) -> None:
        """A caller that overwrites a tensor after `put` must put a copy only if `keeps_tensors` is True."""
        producer, consumer = ends
        borrowed = torch.arange(100)
        producer.put("a", 0, borrowed.clone() if producer.keeps_tensors else borrowed)
        borrowed.zero_()
        assert torch.equal(consumer.get(producer.address, "a", 0, PATIENCE_S), torch.arange(100))

    def test_closing_leaves_nothing(self) -> None:
        threads, files = set(threading.enumerate()), set(os.listdir("/proc/self/fd"))
        made = connector(self.config)
        producer, consumer = made.producer(EDGE), made.consumer(EDGE)
        producer.put("a", 0, torch.ones(4))
        consumer.get(producer.address, "a", 0, PATIENCE_S)
        for _ in range(2):
            producer.close()
        with pytest.raises(ConnectorError):
            producer.put("a", 1, torch.ones(4))
        with pytest.raises(ProducerLost):
            consumer.get(producer.address, "a", 0, PATIENCE_S)
        for _ in range(2):
            consumer.close()
        with pytest.raises(ConnectorError):
            consumer.get(producer.address, "a", 0, PATIENCE_S)
        self.check_left(threads, files)

    def check_left(self, threads: set[threading.Thread], files: set[str]) -> None:
        """Check that closing leaves no threads and files. Override it for a library that keeps some in a process."""
        left = {t.name for t in set(threading.enumerate()) - threads if t.name.startswith("omni-")}
        assert left == set()
        eventually(lambda: len(os.listdir("/proc/self/fd")) <= len(files) + 3, "file descriptors are left open")

    def test_no_process_at_the_address(self, ends: tuple[Producer, Consumer]) -> None:
        _, consumer = ends
        with connector(self.config).producer(EDGE) as producer:
            address = producer.address
        consumer.forget(address, "a")
        for _ in range(2):
            since = time.monotonic()
            with pytest.raises(ProducerLost):
                consumer.get(address, "a", 0, PATIENCE_S)
            assert time.monotonic() - since < NOTICED_S

    def test_between_processes(self) -> None:
        with Child(produce, self.config) as writer, Child(consume, self.config) as reader:
            source = writer.receive()
            writer.pipe.send(("a", 5, 100))
            writer.receive()
            reader.pipe.send(("a", source, 5))
            assert reader.receive() == [index * 6400.0 for index in range(5)]

    def test_a_stopped_producer_is_waited_for_until_the_deadline(self) -> None:
        with Child(produce, self.config) as writer, connector(self.config).consumer(EDGE) as consumer:
            source = writer.receive()
            for request, rows in (("a", 10), ("b", 20)):
                writer.pipe.send((request, 1, rows))
                writer.receive()
            assert torch.equal(consumer.get(source, "a", 0, PATIENCE_S), torch.zeros(10, 64))
            writer.stop()
            for deadline in (0.0, 0.2):
                since = time.monotonic()
                with pytest.raises(DeadlinePassed):
                    consumer.get(source, "a", 0, deadline)
                assert deadline <= time.monotonic() - since < deadline + NOTICED_S
            os.kill(writer.process.pid or 0, signal.SIGCONT)
            assert torch.equal(consumer.get(source, "b", 0, PATIENCE_S), torch.zeros(20, 64)), "a late reply was taken"

    def test_a_killed_producer_is_noticed(self) -> None:
        with Child(produce, self.config) as writer, connector(self.config).consumer(EDGE) as consumer:
            source = writer.receive()
            writer.pipe.send(("a", 1, 10))
            writer.receive()
            consumer.get(source, "a", 0, PATIENCE_S)
            writer.stop()
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(consumer.get, source, "a", 0, PATIENCE_S)
                time.sleep(0.2)
                since = time.monotonic()
                writer.kill()
                with pytest.raises(ProducerLost):
                    waiting.result(PATIENCE_S)
                assert time.monotonic() - since < NOTICED_S

    def test_a_killed_consumer_is_replaced(self) -> None:
        with connector(self.config).producer(EDGE) as producer, Child(consume, self.config) as first:
            for index in range(3):
                producer.put("a", index, torch.full((4,), float(index)))
            first.pipe.send(("a", producer.address, 3))
            assert first.receive() == [0.0, 4.0, 8.0]
            first.kill()
            with connector(self.config).consumer(EDGE) as second:
                got = [second.get(producer.address, "a", index, PATIENCE_S).sum().item() for index in range(3)]
                assert got == [0.0, 4.0, 8.0]
                second.forget(producer.address, "a")
                eventually(lambda: empty(producer), "the dead consumer holds the producer's memory")
