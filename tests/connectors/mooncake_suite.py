"""The public suite on Mooncake; `test_mooncake.py` runs it where only loopback can be reached."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from tests.connectors.test_stress import Storm
from tests.support.pace import pace
from vllm_omni_ext.connectors.base import MIB, ConnectorConfig, DeadlinePassed
from vllm_omni_ext.connectors.conformance import EDGE, PATIENCE_S, Conformance
from vllm_omni_ext.connectors.mooncake import Mooncake

CONFIG = ConnectorConfig(name="mooncake")


class TestMooncake(Conformance):
    config = CONFIG

    def check_left(self, threads: set[threading.Thread], files: set[str]) -> None:
        """The engine keeps its threads and sockets as long as the process lives."""
        assert {t.name for t in set(threading.enumerate()) - threads if t.name.startswith("omni-")} == set()


def test_a_chunk_larger_than_the_receive_buffer_arrives_in_pieces() -> None:
    made = Mooncake(ConnectorConfig(name="mooncake", window_bytes=MIB))
    with made.producer(EDGE) as producer, made.consumer(EDGE) as consumer:
        sent = torch.arange(5 * MIB // 8 + 3)
        producer.put("a", 0, sent)
        assert torch.equal(consumer.get(producer.address, "a", 0, PATIENCE_S), sent)


def test_a_late_read_keeps_the_receive_buffer_until_it_ends() -> None:
    made = Mooncake(CONFIG)
    with made.producer(EDGE) as producer, made.consumer(EDGE) as consumer:
        release, read = threading.Event(), consumer._registered.engine.transfer_sync_read

        class Slow:
            def transfer_sync_read(self, *args: object) -> int:
                release.wait(10)
                return int(read(*args))

        consumer._registered.engine, engine = Slow(), consumer._registered.engine
        try:
            producer.put("a", 0, torch.ones(10))
            producer.put("b", 0, torch.zeros(10))
            since = time.monotonic()
            for request in ("a", "b"):
                with pytest.raises(DeadlinePassed):
                    consumer.get(producer.address, request, 0, 0.3)
            assert time.monotonic() - since < 2 * pace()
            release.set()
            assert torch.equal(consumer.get(producer.address, "b", 0, PATIENCE_S), torch.zeros(10))
        finally:
            release.set()
            consumer._registered.engine = engine


def test_each_request_is_read_whole_or_was_forgotten_or_is_lost_with_its_producer() -> None:
    Storm(CONFIG).run()
