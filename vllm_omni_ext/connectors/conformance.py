"""Public test suite for connectors. Needs pytest.

    from vllm_omni_ext.connectors.base import ConnectorConfig
    from vllm_omni_ext.connectors.conformance import Conformance

    class TestMine(Conformance):
        config = ConnectorConfig(name="my_package.my_module:MyConnector")

`config` must leave the limits at their defaults. Producers and consumers run in threads and, unless `processes` is
false, also in processes that are killed with SIGKILL.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from vllm_omni_ext.connectors.base import (
    MIB,
    BackPressure,
    ChunkFailed,
    ChunkKey,
    ConnectorConfig,
    ConnectorError,
    Consumer,
    DeadlinePassed,
    Forgotten,
    NoSuchChunk,
    Producer,
    ProducerLost,
)
from vllm_omni_ext.connectors.registry import connector

EDGE = "hidden_states"
PATIENCE_S = 30.0
"""Timeout for events that must happen, also on a busy machine."""

NOTICED_S = 1.0
"""Longest time in which the end of a process, a failure or a deadline must be detected."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool)
SHAPES = ((3, 5), (), (0,), (4, 0, 2), (1, 1, 1, 7))


def key(request: str, index: int = 0) -> ChunkKey:
    """Return a chunk key on the edge of these tests."""
    return ChunkKey(request, EDGE, index)


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


def empty(*ends: Producer | Consumer) -> bool:
    """Whether no request, chunk or memory is held."""
    return all((s.requests, s.chunks, s.held_bytes) == (0, 0, 0) for s in (end.stats() for end in ends))


def produce(config: ConnectorConfig, pipe: Any) -> None:
    """Body of a process with a producer: sends its address, then puts chunks on command."""
    with connector(config).producer(EDGE) as producer:
        pipe.send(producer.address)
        while (command := pipe.recv()) is not None:
            request, count, rows = command
            for index in range(count):
                producer.put(key(request, index), [torch.full((rows, 64), float(index))], last=index == count - 1)
            pipe.send(producer.stats())


def consume(config: ConnectorConfig, pipe: Any) -> None:
    """Body of a process with a consumer: opens requests on command and sends the sums of their chunks."""
    with connector(config).consumer(EDGE) as consumer:
        while (command := pipe.recv()) is not None:
            request, source, count = command
            consumer.open(request, source)
            pipe.send([consumer.get(key(request, i), PATIENCE_S).parts[0].sum().item() for i in range(count)])


class Child:
    """A child process of the tests."""

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

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        if self.process.is_alive() and self.process.pid is not None:
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()
        self.pipe.close()


@contextmanager
def child(target: Callable[[ConnectorConfig, Any], None], config: ConnectorConfig) -> Iterator[Child]:
    """Start a process that is killed at the end of the block."""
    made = Child(target, config)
    try:
        yield made
    finally:
        made.kill()


class Conformance:
    """The test suite. Subclasses set `config` to the connector under test."""

    config: ClassVar[ConnectorConfig]
    processes: ClassVar[bool] = True
    """Whether the connector works between processes."""

    large_bytes: ClassVar[int] = 200 * MIB

    @pytest.fixture
    def ends(self) -> Iterator[tuple[Producer, Consumer]]:
        made = connector(self.config)
        with made.producer(EDGE) as producer, made.consumer(EDGE) as consumer:
            yield producer, consumer

    def require_processes(self) -> None:
        if not self.processes:
            pytest.skip("connects no processes")

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_tensors_arrive_as_they_were(self, ends: tuple[Producer, Consumer], dtype: torch.dtype) -> None:
        producer, consumer = ends
        parts = [tensor(dtype, shape) for shape in SHAPES] + [tensor(dtype, (6, 8)).t()[1:5]]
        producer.put(key("a"), [*parts, b"bytes", b""], meta=b"meta", last=True)
        consumer.open("a", producer.address)
        got = consumer.get(key("a"))
        *tensors, data, nothing = got.parts
        assert (bytes(data), bytes(nothing), got.meta, got.last) == (b"bytes", b"", b"meta", True)
        for sent, part in zip(parts, tensors, strict=True):
            assert part.dtype == sent.dtype and part.shape == sent.shape and torch.equal(part, sent)

    def test_order_does_not_matter_and_reading_takes_nothing_away(self, ends: tuple[Producer, Consumer]) -> None:
        producer, consumer = ends
        consumer.open("a", producer.address)
        for index in (2, 0, 1):
            producer.put(key("a", index), [torch.tensor([index])], last=index == 2)
        for index in (1, 2, 0, 0, 2):
            assert consumer.get(key("a", index)).parts[0].item() == index
            assert consumer.get(key("a", index)).last is (index == 2)
        with pytest.raises(NoSuchChunk):
            consumer.get(key("a", 3))

    def test_a_waiting_get_is_woken(self, ends: tuple[Producer, Consumer]) -> None:
        producer, consumer = ends
        consumer.open("a", producer.address)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(consumer.get, key("a"), PATIENCE_S)
            time.sleep(0.1)
            assert not waiting.done()
            producer.put(key("a"), [torch.ones(2)], last=True)
            assert torch.equal(waiting.result(PATIENCE_S).parts[0], torch.ones(2))

    def test_the_listener_hears_of_everything(self) -> None:
        events: list[str] = []
        made = connector(self.config)
        with made.producer(EDGE) as producer, made.consumer(EDGE, events.append) as consumer:
            for name in ("chunk", "failure"):
                consumer.open(name, producer.address)
            producer.put(key("chunk"), [b"x"])
            producer.fail("failure", "no")
            eventually(lambda: sorted(events) == ["chunk", "failure"], "the listener got no event")
            consumer.open("loss", producer.address)
            consumer.open("chunk", producer.address)
            producer.close()
            eventually(lambda: "loss" in events, "the listener got no event about the lost producer")

    def test_a_deadline_is_kept(self, ends: tuple[Producer, Consumer]) -> None:
        producer, consumer = ends
        consumer.open("a", producer.address)
        for deadline in (0.0, 0.2):
            since = time.monotonic()
            with pytest.raises(DeadlinePassed):
                consumer.get(key("a"), deadline)
            assert deadline <= time.monotonic() - since < deadline + NOTICED_S

    def test_a_failure_is_told_at_once_and_to_late_comers(self, ends: tuple[Producer, Consumer]) -> None:
        producer, consumer = ends
        consumer.open("a", producer.address)
        producer.put(key("a"), [torch.ones(8)])
        consumer.get(key("a"))
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(consumer.get, key("a", 1), PATIENCE_S)
            time.sleep(0.1)
            since = time.monotonic()
            producer.fail("a", "the camera is broken")
            with pytest.raises(ChunkFailed) as caught:
                waiting.result(PATIENCE_S)
        assert caught.value.reason == "the camera is broken" and time.monotonic() - since < NOTICED_S
        with pytest.raises(ChunkFailed):
            producer.put(key("a", 1), [b""])
        producer.fail("b", "too")
        consumer.open("b", producer.address)
        with pytest.raises(ChunkFailed):
            consumer.get(key("b"))
        consumer.forget("a")
        consumer.forget("b")
        eventually(lambda: empty(producer, consumer), "something is left of a failed request")

    def test_the_consumer_forgets(self, ends: tuple[Producer, Consumer]) -> None:
        producer, consumer = ends
        consumer.open("a", producer.address)
        producer.put(key("a"), [torch.ones(1000)])
        kept = consumer.get(key("a")).parts[0]
        consumer.forget("a")
        eventually(lambda: empty(producer, consumer), "something is left of a forgotten request")
        with pytest.raises(Forgotten):
            producer.put(key("a", 1), [torch.ones(1000)])
        with pytest.raises(ValueError, match="not open"):
            consumer.get(key("a"))
        producer.put(key("b"), [torch.zeros(1000)])
        assert torch.equal(kept, torch.ones(1000)), "what was read changed when its place was used again"

    def test_the_producer_forgets(self, ends: tuple[Producer, Consumer]) -> None:
        producer, consumer = ends
        consumer.open("a", producer.address)
        producer.put(key("a"), [torch.ones(1000)])
        consumer.get(key("a"))
        producer.forget("a")
        with pytest.raises(Forgotten):
            consumer.get(key("a", 1))
        eventually(lambda: empty(producer), "something is left of a forgotten request")
        consumer.forget("a")
        assert empty(consumer)
        producer.forget("a")
        producer.forget("unknown")

    def test_two_consumers_and_one_request(self) -> None:
        made = connector(self.config)
        with made.producer(EDGE) as producer, made.consumer(EDGE) as one, made.consumer(EDGE) as two:
            producer.put(key("a"), [torch.ones(3)], last=True)
            for consumer in (one, two):
                consumer.open("a", producer.address)
                assert torch.equal(consumer.get(key("a")).parts[0], torch.ones(3))
            one.forget("a")
            assert torch.equal(two.get(key("a")).parts[0], torch.ones(3))
            one.close()
            assert torch.equal(two.get(key("a")).parts[0], torch.ones(3))
            two.forget("a")
            eventually(lambda: empty(producer, two), "the last reader left something")

    def test_many_producers_and_streams(self) -> None:
        made = connector(self.config)
        producers = [made.producer(EDGE) for _ in range(3)]
        consumers = [made.consumer(EDGE) for _ in range(2)]

        def stream(number: int) -> bool:
            name, producer, consumer = f"r{number}", producers[number % 3], consumers[number % 2]
            consumer.open(name, producer.address)
            for index in range(8):
                producer.put(key(name, index), [torch.full((number + 1,), index)], last=index == 7)
            got = [consumer.get(key(name, index)).parts[0] for index in range(8)]
            consumer.forget(name)
            return all(torch.equal(part, torch.full((number + 1,), index)) for index, part in enumerate(got))

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(stream, range(100)))
        eventually(lambda: empty(*producers, *consumers), "streams left something")
        for producer in producers:
            producer.close()
        for consumer in consumers:
            consumer.close()

    def test_no_room_is_an_error_and_ends_when_something_is_forgotten(self) -> None:
        made = connector(replace(self.config, capacity_bytes=MIB))
        with made.producer(EDGE) as producer, made.consumer(EDGE) as consumer:
            with pytest.raises(ValueError, match="can never fit"):
                producer.put(key("a"), [torch.zeros(2 * MIB, dtype=torch.uint8)])
            for index in range(4):
                producer.put(key("a", index), [torch.zeros(MIB // 4, dtype=torch.uint8)])
            since = time.monotonic()
            with pytest.raises(BackPressure):
                producer.put(key("b"), [torch.zeros(1, dtype=torch.uint8)])
            assert time.monotonic() - since < NOTICED_S
            assert producer.stats().held_bytes <= MIB
            consumer.open("a", producer.address)
            consumer.get(key("a", 3))
            consumer.forget("a")
            eventually(lambda: empty(producer), "the room was not given back")
            producer.put(key("b"), [torch.zeros(MIB, dtype=torch.uint8)])

    def test_empty_chunks_need_room_too(self) -> None:
        made = connector(replace(self.config, capacity_bytes=4096))
        with made.producer(EDGE) as producer, pytest.raises(BackPressure):
            for index in range(10_000):
                producer.put(key("a", index), [])

    def test_an_abandoned_request_is_dropped(self) -> None:
        made = connector(replace(self.config, retention_s=0.3))
        with made.producer(EDGE) as producer, made.consumer(EDGE) as consumer:
            consumer.open("open", producer.address)
            producer.put(key("open"), [torch.ones(5)])
            consumer.get(key("open"))
            producer.put(key("abandoned"), [torch.ones(5)])
            time.sleep(0.5)
            producer.put(key("other"), [torch.ones(5)])
            with pytest.raises(Forgotten):
                consumer.open("abandoned", producer.address)
                consumer.get(key("abandoned"))
            assert torch.equal(consumer.get(key("open")).parts[0], torch.ones(5)), "a consumer has it open"

    def test_mistakes_of_the_caller(self, ends: tuple[Producer, Consumer]) -> None:
        producer, consumer = ends
        producer.put(key("a", 1), [b"x"], last=True)
        for wrong in (key("a", 1), key("a", 2), ChunkKey("a", "another edge", 0)):
            with pytest.raises(ValueError):
                producer.put(wrong, [b"x"])
        with pytest.raises(ValueError):
            producer.put(key("a", 0), [b"x"], last=True)
        with pytest.raises(ValueError):
            producer.put(key("b"), [], meta=bytes(MIB))
        with pytest.raises(ValueError):
            consumer.open("a", "nonsense")
        with pytest.raises(ValueError):
            consumer.get(key("never opened"))
        producer.put(key("a", 0), [b"x"])
        consumer.open("a", producer.address)
        assert bytes(consumer.get(key("a", 1)).parts[0]) == b"x"

    def test_a_large_chunk(self, ends: tuple[Producer, Consumer]) -> None:
        producer, consumer = ends
        sent = torch.arange(self.large_bytes // 8)
        producer.put(key("a"), [sent], last=True)
        consumer.open("a", producer.address)
        assert torch.equal(consumer.get(key("a"), PATIENCE_S).parts[0], sent)

    def test_closing_leaves_nothing_and_ends_every_wait(self) -> None:
        threads, files = set(threading.enumerate()), set(os.listdir("/proc/self/fd"))
        made = connector(self.config)
        producer, consumer = made.producer(EDGE), made.consumer(EDGE)
        consumer.open("a", producer.address)
        producer.put(key("a"), [torch.ones(4)])
        consumer.get(key("a"))
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(consumer.get, key("a", 1), PATIENCE_S)
            time.sleep(0.1)
            producer.close()
            with pytest.raises(ProducerLost):
                waiting.result(PATIENCE_S)
            with pytest.raises(ConnectorError):
                producer.put(key("a", 1), [])
            with connector(self.config).producer(EDGE) as another:
                consumer.open("b", another.address)
                waiting = pool.submit(consumer.get, key("b"), PATIENCE_S)
                time.sleep(0.1)
                consumer.close()
                with pytest.raises(ConnectorError):
                    waiting.result(PATIENCE_S)
        producer.close()
        consumer.close()
        self.check_left(threads, files)

    def check_left(self, threads: set[threading.Thread], files: set[str]) -> None:
        """Check that closing leaves no threads and files. Override to allow those that a library keeps per process."""
        left = {t.name for t in set(threading.enumerate()) - threads if t.name.startswith("omni-")}
        assert left == set()
        eventually(lambda: len(os.listdir("/proc/self/fd")) <= len(files) + 3, "file descriptors are left open")

    def test_nobody_at_the_address(self, ends: tuple[Producer, Consumer]) -> None:
        _, consumer = ends
        with connector(self.config).producer(EDGE) as producer:
            address = producer.address
        since = time.monotonic()
        consumer.open("a", address)
        with pytest.raises(ProducerLost):
            consumer.get(key("a"), PATIENCE_S)
        assert time.monotonic() - since < NOTICED_S

    def test_between_processes(self) -> None:
        self.require_processes()
        with child(produce, self.config) as writer, child(consume, self.config) as reader:
            source = writer.receive()
            reader.pipe.send(("a", source, 5))
            writer.pipe.send(("a", 5, 100))
            assert reader.receive() == [index * 6400.0 for index in range(5)]

    def test_a_killed_producer_is_noticed(self) -> None:
        self.require_processes()
        with child(produce, self.config) as writer, connector(self.config).consumer(EDGE) as consumer:
            source = writer.receive()
            consumer.open("a", source)
            writer.pipe.send(("a", 1, 10))
            assert consumer.get(key("a"), PATIENCE_S).last
            consumer.open("b", source)
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(consumer.get, key("b"), PATIENCE_S)
                time.sleep(0.2)
                since = time.monotonic()
                writer.kill()
                with pytest.raises(ProducerLost):
                    waiting.result(PATIENCE_S)
                assert time.monotonic() - since < NOTICED_S
            consumer.forget("a")
            consumer.forget("b")
            eventually(lambda: empty(consumer), "a lost producer's requests are held")

    def test_a_killed_consumer_is_replaced(self) -> None:
        self.require_processes()
        with connector(self.config).producer(EDGE) as producer, child(consume, self.config) as first:
            for index in range(3):
                producer.put(key("a", index), [torch.full((4,), float(index))], last=index == 2)
            first.pipe.send(("a", producer.address, 3))
            assert first.receive() == [0.0, 4.0, 8.0]
            first.kill()
            with child(consume, self.config) as second:
                second.pipe.send(("a", producer.address, 3))
                assert second.receive() == [0.0, 4.0, 8.0]
            producer.forget("a")
            eventually(lambda: empty(producer), "the dead consumers hold the producer's memory")
