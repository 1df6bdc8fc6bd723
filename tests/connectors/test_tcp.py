"""TCP: everything from the network is checked, and a consumer is sent no more than its window."""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
import zmq

from tests.support.noise import garbage, mutated
from vllm_omni_ext.connectors import messages as wire
from vllm_omni_ext.connectors.base import MIB, ConnectorConfig, ProducerLost
from vllm_omni_ext.connectors.conformance import EDGE, PATIENCE_S, empty, eventually, key
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
    valid = [
        wire.encode(wire.Open(request="noise", window=5)),
        wire.encode(wire.Want(request="noise", index=2**40)),
        wire.encode(wire.Taken(request="noise", nbytes=2**60)),
    ]
    enemies = [raw(zmq.DEALER), raw(zmq.DEALER)]
    for enemy in enemies:
        enemy.connect(endpoint)
    enemies[1].send(wire.encode(wire.Hello(token=token, edge=EDGE)))
    enemies[1].send_multipart([valid[0], b"more"])
    eventually(lambda: producer.stats().dropped == 1, "a message of two frames was accepted")
    for enemy in enemies:
        for _ in range(MESSAGES):
            enemy.send_multipart(noise(rng, valid))
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    for _ in range(20):  # no ZMTP at all
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(os.urandom(500))
    # All messages of the peer without the token, and most of the other's.
    eventually(lambda: producer.stats().dropped > 1.5 * MESSAGES, "noise was not counted")
    producer.put(key("a"), [torch.ones(9)], last=True)
    consumer.open("a", producer.address)
    assert torch.equal(consumer.get(key("a"), PATIENCE_S).parts[0], torch.ones(9))


def test_a_peer_without_the_token_reads_and_forgets_nothing(producer: TcpProducer, raw: Any) -> None:
    producer.put(key("a"), [torch.ones(9)])
    stranger = raw(zmq.DEALER)
    stranger.reconnect_ivl = -1
    monitor = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    stranger.connect(parse(producer.address)[0])
    wrong = wire.Hello(token="0" * 32, edge=EDGE)
    for message in (wrong, wire.Open(request="a", window=0), wire.Forget(request="a")):
        stranger.send(wire.encode(message))
    assert stranger.poll(int(PATIENCE_S * 1000))
    assert isinstance(wire.TO_CONSUMER.decode(stranger.recv()), wire.Refused)
    eventually(lambda: producer.stats().dropped == 3, "it was not counted")
    assert stranger.poll(200) == 0 and producer.stats().chunks == 1
    stranger.send(bytes(wire.MAX_MESSAGE_BYTES + 1))
    assert monitor.poll(int(PATIENCE_S * 1000)), "a frame that is too long ends the connection"
    assert producer.stats().dropped == 3


def lies() -> list[list[bytes]]:
    """Return messages of a producer that do not fit together."""
    part = wire.PartHead("float32", (4,), 0, 16)
    head = wire.ChunkHeader(request="a", index=0, last=True, meta=b"", parts=(part,), nbytes=16)
    change = msgspec.structs.replace
    slice_ = wire.encode(wire.Slice(request="a", index=0, start=0))
    heads = [
        change(head, nbytes=8),
        change(head, nbytes=2**60),
        change(head, parts=(change(part, shape=(2**40,)),)),
        change(head, parts=(change(part, dtype="nn"),)),
        change(head, parts=(change(part, offset=2**50),)),
    ]
    behind = wire.encode(wire.Slice(request="a", index=0, start=10))
    return [
        *([wire.encode(lie)] for lie in heads),
        [slice_, bytes(16)],
        *([wire.encode(head)], [behind, bytes(16)]),
        [slice_],
        [slice_, bytes(17)],
        [b"\xff"],
    ]


def test_a_consumer_drops_chunks_that_do_not_fit_their_headers(consumer: TcpConsumer, raw: Any) -> None:
    liar = raw(zmq.ROUTER)
    port = liar.bind_to_random_port("tcp://127.0.0.1")
    consumer.open("a", f"tcp://127.0.0.1:{port}#{'0' * 32}")
    peer, _ = liar.recv_multipart()
    liar.recv_multipart()
    sent = lies()
    for frames in sent:
        liar.send_multipart([peer, *frames])
    eventually(
        lambda: consumer.stats().dropped == len(sent) - 1, "a bad message was not dropped"
    )  # one is a real header
    assert consumer.stats().chunks == 0
    liar.send_multipart([peer, wire.encode(wire.Slice(request="a", index=0, start=0)), bytes(16)])
    assert torch.equal(consumer.get(key("a"), PATIENCE_S).parts[0], torch.zeros(4))


def test_a_consumer_is_sent_no_more_than_its_window(producer: TcpProducer) -> None:
    with Tcp(replace(CONFIG, window_bytes=MIB)).consumer(EDGE) as slow:
        slow.open("a", producer.address)
        for index in range(40):
            producer.put(key("a", index), [torch.full((MIB // 4,), index, dtype=torch.uint8)], last=index == 39)
        eventually(lambda: slow.stats().held_bytes == MIB, "less was sent than the window")
        time.sleep(0.2)
        assert slow.stats().held_bytes == MIB
        assert slow.get(key("a", 39)).last, "a requested chunk arrives in any case"
        for index in (*range(39), 5):
            assert slow.get(key("a", index)).parts[0][0] == index
            assert slow.stats().held_bytes <= MIB
        slow.forget("a")
        eventually(lambda: empty(producer, slow), "something is left")


def test_an_unread_stream_does_not_block_another(producer: TcpProducer) -> None:
    with Tcp(replace(CONFIG, window_bytes=MIB)).consumer(EDGE) as consumer:
        for name in ("unread", "read"):
            consumer.open(name, producer.address)
            for index in range(8):
                producer.put(key(name, index), [torch.zeros(MIB, dtype=torch.uint8)])
        assert all(consumer.get(key("read", index), PATIENCE_S) for index in range(8))


def test_another_edge_is_refused(producer: TcpProducer) -> None:
    with Tcp(CONFIG).consumer("other") as other:
        other.open("a", producer.address)
        with pytest.raises(ProducerLost, match="edge 'hidden_states', not 'other'"):
            other.get(replace(key("a"), edge="other"), PATIENCE_S)


@pytest.mark.parametrize("options", [{}, OTHER.connecting], ids=["no keys", "other keys"])
def test_a_peer_without_the_keys_receives_nothing(raw: Any, options: Any) -> None:
    with Tcp(replace(CONFIG, listening=KEYS.listening)).producer(EDGE) as producer:
        producer.put(key("a"), [torch.ones(9)], last=True)
        endpoint, token = parse(producer.address)
        enemy = raw(zmq.DEALER)
        for option, value in options.items():
            enemy.setsockopt(option, value)
        enemy.connect(endpoint)
        enemy.send(wire.encode(wire.Hello(token=token, edge=EDGE)))
        enemy.send(wire.encode(wire.Open(request="a", window=MIB)))
        assert not enemy.poll(QUIET_MS)
        with Tcp(replace(CONFIG, connecting=options)).consumer(EDGE) as consumer:
            consumer.open("a", producer.address)
            with pytest.raises(ProducerLost):
                consumer.get(key("a"), PATIENCE_S)
        with Tcp(replace(CONFIG, connecting=KEYS.connecting)).consumer(EDGE) as member:
            member.open("a", producer.address)
            assert torch.equal(member.get(key("a"), PATIENCE_S).parts[0], torch.ones(9))


def test_a_producer_without_the_keys_receives_no_message(raw: Any) -> None:
    liar = raw(zmq.ROUTER)
    port = liar.bind_to_random_port("tcp://127.0.0.1")
    with Tcp(replace(CONFIG, connecting=KEYS.connecting)).consumer(EDGE) as consumer:
        consumer.open("a", f"tcp://127.0.0.1:{port}#{'0' * 32}")
        with pytest.raises(ProducerLost):
            consumer.get(key("a"), PATIENCE_S)
    assert not liar.poll(0)


def test_keys_are_not_printed() -> None:
    config = replace(CONFIG, listening=KEYS.listening, connecting=KEYS.connecting)
    assert KEYS.server.private.decode() not in repr(config) and "listening" not in repr(config)
