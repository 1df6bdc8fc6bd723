"""The public suite on Mooncake; `test_mooncake.py` runs it where only loopback can be reached."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from tests.support.pace import pace
from tests.support.streams import Storm
from vllm_omni_ext.connectors.base import MIB, ConnectorConfig, DeadlinePassed
from vllm_omni_ext.connectors.conformance import EDGE, Conformance, empty, eventually, key
from vllm_omni_ext.connectors.mooncake import Mooncake

CONFIG = ConnectorConfig(name="mooncake")


class TestMooncake(Conformance):
    config = CONFIG

    def check_left(self, threads: set[threading.Thread], files: set[str]) -> None:
        """The engine keeps its threads and sockets as long as the process lives."""
        assert {t.name for t in set(threading.enumerate()) - threads if t.name.startswith("omni-")} == set()


def test_a_chunk_larger_than_the_landing_area_arrives_in_pieces() -> None:
    made = Mooncake(ConnectorConfig(name="mooncake", window_bytes=MIB))
    with made.producer(EDGE) as producer, made.consumer(EDGE) as consumer:
        sent = torch.arange(5 * MIB // 8 + 3)
        producer.put(key("a"), [sent])
        consumer.open("a", producer.address)
        assert torch.equal(consumer.get(key("a")).parts[0], sent)


def test_a_read_that_is_late_keeps_its_places_until_it_ends() -> None:
    made = Mooncake(CONFIG)
    with made.producer(EDGE) as producer, made.consumer(EDGE) as consumer:
        release, read = threading.Event(), consumer._registered.engine.transfer_sync_read

        class Slow:
            def transfer_sync_read(self, *args: object) -> int:
                release.wait(10)
                return int(read(*args))

        consumer._registered.engine, engine = Slow(), consumer._registered.engine
        try:
            producer.put(key("a"), [torch.ones(10)])
            consumer.open("a", producer.address)
            since = time.monotonic()
            with pytest.raises(DeadlinePassed):
                consumer.get(key("a"), 0.3)
            assert time.monotonic() - since < pace()
            consumer.forget("a")
            time.sleep(0.1)
            assert producer.stats().held_bytes > 0, "memory that is being read was given back"
            assert consumer._landing.used_bytes > 0
            release.set()
            eventually(lambda: empty(producer, consumer), "the late read left something")
            assert consumer._landing.used_bytes == 0
        finally:
            release.set()
            consumer._registered.engine = engine


def test_each_stream_ends_as_planned_or_is_lost_with_its_producer() -> None:
    """The engine keeps connections to killed processes as long as the process lives."""
    Storm(CONFIG, 1000, keeps_files=True).run()
