"""TCP: everything from the network is checked."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
import zmq

from tests.support.noise import garbage, mutated
from vllm_omni_ext.connectors import messages as wire
from vllm_omni_ext.connectors.base import ConnectorConfig, ConnectorError, ProducerLost
from vllm_omni_ext.connectors.conformance import EDGE, PATIENCE_S, eventually
from vllm_omni_ext.connectors.tcp import Tcp, TcpConsumer, TcpProducer
from vllm_omni_ext.connectors.zmq_transport import parse
from vllm_omni_ext.coordinator.keys import Keys

CONFIG = ConnectorConfig(name="tcp")
MESSAGES = 400
KEYS, OTHER = Keys.derive(b"correct horse battery staple"), Keys.derive(b"another horse, another staple")
QUIET_MS = 300


@pytest.fixture
def producer() -> Iterator[TcpProducer]:
    with Tcp(CONFIG).producer(EDGE) as made:
        yield made


@pytest.fixture
def consumer() -> Iterator[TcpConsumer]:
    with Tcp(CONFIG).consumer(EDGE) as made:
        yield made


@pytest.fixture
def raw() -> Iterator[Any]:
    """Makes sockets that are closed afterwards; unsent messages are dropped."""
    context = zmq.Context()
    context.linger = 0
    yield context.socket
    context.destroy()


def noise(rng: random.Random, valid: list[bytes]) -> list[bytes]:
    """Return the frames of one message: random bytes, a damaged real message, or a real one with more frames."""
    return rng.choice(([garbage(rng, 200)], [mutated(rng, valid)], [rng.choice(valid), b"x"]))


def test_malformed_messages_are_counted_and_dropped(producer: TcpProducer, consumer: TcpConsumer, raw: Any) -> None:
    endpoint, token = parse(producer.address)
    rng = random.Random(5)
    read = wire.Read(token=token, number=1, request="noise", index=2**40)
    valid = [wire.encode(read), wire.encode(wire.Forget(token=token, request="noise"))]
    enemy = raw(zmq.DEALER)
    enemy.connect(endpoint)
    enemy.send_multipart([valid[0], b"more"])
    eventually(lambda: producer.stats().dropped == 1, "a message of two frames was accepted")
    for _ in range(MESSAGES):
        enemy.send_multipart(noise(rng, valid))
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    for _ in range(20):  # no ZMTP at all
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(os.urandom(500))
    eventually(lambda: producer.stats().dropped > MESSAGES / 2, "noise was not counted")
    producer.put("a", 0, torch.ones(9))
    assert torch.equal(consumer.get(producer.address, "a", 0, PATIENCE_S), torch.ones(9))


def test_a_producer_whose_thread_has_failed_takes_no_chunks(
    producer: TcpProducer, consumer: TcpConsumer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No consumer could read them."""
    producer.put("a", 0, torch.ones(9))
    monkeypatch.setattr(producer, "_reply", lambda peer, message: 1 / 0)
    with pytest.raises(ProducerLost):
        consumer.get(producer.address, "a", 0, PATIENCE_S)
    with pytest.raises(ConnectorError, match="the producer has failed: ZeroDivisionError: division by zero"):
        producer.put("a", 1, torch.ones(9))
    assert "omni-producer-" in caplog.text and producer.stats().requests == 0


def test_a_peer_without_the_token_reads_and_forgets_nothing(producer: TcpProducer, raw: Any) -> None:
    producer.put("a", 0, torch.ones(9))
    stranger = raw(zmq.DEALER)
    stranger.reconnect_ivl = -1
    monitor = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    stranger.connect(parse(producer.address)[0])
    wrong = "0" * 32
    for message in (wire.Read(token=wrong, number=0, request="a", index=0), wire.Forget(token=wrong, request="a")):
        stranger.send(wire.encode(message))
    assert stranger.poll(int(PATIENCE_S * 1000))
    assert isinstance(wire.TO_CONSUMER.decode(stranger.recv()), wire.Refused)
    eventually(lambda: producer.stats().dropped == 2, "it was not counted")
    assert stranger.poll(200) == 0 and producer.stats().requests == 1
    stranger.send(bytes(wire.MAX_MESSAGE_BYTES + 1))
    assert monitor.poll(int(PATIENCE_S * 1000)), "a frame that is too long ends the connection"
    assert producer.stats().dropped == 2


HEAD = wire.Chunk(number=0, dtype="float32", shape=(4,), nbytes=16)
LIES = [
    [msgspec.structs.replace(HEAD, nbytes=8), bytes(8)],
    [msgspec.structs.replace(HEAD, nbytes=2**60), bytes(16)],
    [msgspec.structs.replace(HEAD, shape=(2**40,)), bytes(16)],
    [msgspec.structs.replace(HEAD, dtype="nn"), bytes(16)],
    [HEAD],
    [HEAD, bytes(17)],
    [HEAD, bytes(8), bytes(9)],
]


@pytest.mark.parametrize("lie", [*LIES, [b"\xff"]], ids=str)
def test_a_consumer_refuses_a_chunk_that_does_not_fit_its_header(
    consumer: TcpConsumer, producer: TcpProducer, raw: Any, lie: list[Any]
) -> None:
    liar = raw(zmq.ROUTER)
    port = liar.bind_to_random_port("tcp://127.0.0.1")
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(consumer.get, f"tcp://127.0.0.1:{port}#{'0' * 32}", "a", 0, PATIENCE_S)
        peer, _ = liar.recv_multipart()
        liar.send_multipart([peer, *(wire.encode(f) if isinstance(f, wire.Chunk) else f for f in lie)])
        with pytest.raises(ProducerLost, match="a/0"):
            got.result(PATIENCE_S)
    producer.put("a", 0, torch.ones(9))
    assert torch.equal(consumer.get(producer.address, "a", 0, PATIENCE_S), torch.ones(9))


@pytest.mark.parametrize("options", [{}, OTHER.connecting], ids=["no keys", "other keys"])
def test_a_peer_without_the_keys_receives_nothing(raw: Any, options: Any) -> None:
    with Tcp(replace(CONFIG, listening=KEYS.listening)).producer(EDGE) as producer:
        producer.put("a", 0, torch.ones(9))
        endpoint, token = parse(producer.address)
        enemy = raw(zmq.DEALER)
        for option, value in options.items():
            enemy.setsockopt(option, value)
        enemy.connect(endpoint)
        enemy.send(wire.encode(wire.Read(token=token, number=0, request="a", index=0)))
        assert not enemy.poll(QUIET_MS)
        with Tcp(replace(CONFIG, connecting=options)).consumer(EDGE) as consumer, pytest.raises(ProducerLost):
            consumer.get(producer.address, "a", 0, PATIENCE_S)
        with Tcp(replace(CONFIG, connecting=KEYS.connecting)).consumer(EDGE) as member:
            assert torch.equal(member.get(producer.address, "a", 0, PATIENCE_S), torch.ones(9))


def test_a_producer_without_the_keys_receives_no_message(raw: Any) -> None:
    liar = raw(zmq.ROUTER)
    port = liar.bind_to_random_port("tcp://127.0.0.1")
    config = replace(CONFIG, connecting=KEYS.connecting)
    with Tcp(config).consumer(EDGE) as consumer, pytest.raises(ProducerLost):
        consumer.get(f"tcp://127.0.0.1:{port}#{'0' * 32}", "a", 0, PATIENCE_S)
    assert not liar.poll(0)


def test_a_message_without_a_connection_is_an_error(producer: TcpProducer, consumer: TcpConsumer) -> None:
    """ZeroMQ removes a connection whose handshake fails. A blocking `send` of the socket would then never return."""
    link = consumer._link(producer.address)
    link.dealer.disconnect(link.endpoint)
    eventually(lambda: not link.dealer.poll(0, zmq.POLLOUT), "the socket still has the connection")
    with pytest.raises(ProducerLost, match="the connection to the producer was lost"):
        link.send(wire.Forget(token=link.token, request="a"))


def test_keys_are_not_printed() -> None:
    config = replace(CONFIG, listening=KEYS.listening, connecting=KEYS.connecting)
    assert KEYS.server.private.decode() not in repr(config) and "listening" not in repr(config)
