"""TCP: what comes from the network is looked at before it is believed, and nobody is sent more than he reads."""

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

from vllm_omni_ext.connectors.base import MIB, ConnectorConfig, ConnectorError, ProducerLost
from vllm_omni_ext.connectors.conformance import EDGE, PATIENCE_S, empty, eventually, key
from vllm_omni_ext.connectors.tcp import Tcp, TcpConsumer, TcpProducer
from vllm_omni_ext.connectors.zmq_transport import SLICE_BYTES, parse
from vllm_omni_ext.coordinator.keys import Keys
from vllm_omni_ext.wire import chunks as wire

CONFIG = ConnectorConfig(name="tcp")
MESSAGES = 2000
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
    """Makes sockets that are closed afterwards."""
    context = zmq.Context()
    yield lambda kind: context.socket(kind)
    context.destroy(linger=0)


def noise(rng: random.Random, valid: list[bytes]) -> list[bytes]:
    """Frames of one message: random bytes, msgpack of something else, or a real message with damage."""
    match rng.randrange(4):
        case 0:
            return [rng.randbytes(rng.randrange(200))]
        case 1:
            return [msgspec.msgpack.encode({"type": rng.choice(["open", "want", 3, None]), "request": rng.random()})]
        case 2:
            damaged = bytearray(rng.choice(valid))
            damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
            return [bytes(damaged)]
    return [rng.choice(valid), *(rng.randbytes(5) for _ in range(rng.randrange(1, 4)))]


def test_malformed_messages_are_counted_and_dropped(producer: TcpProducer, consumer: TcpConsumer, raw: Any) -> None:
    endpoint, token = parse(producer.address)
    rng = random.Random(5)
    valid = [
        wire.encode(wire.Open(request="noise", window=5)),
        wire.encode(wire.Want(request="noise", index=2**40)),
        wire.encode(wire.Taken(request="noise", nbytes=2**60)),
    ]
    for knows in (False, True):
        enemy = raw(zmq.DEALER)
        enemy.connect(endpoint)
        if knows:
            enemy.send(wire.encode(wire.Hello(token=token, edge=EDGE)))
        for _ in range(MESSAGES):
            enemy.send_multipart(noise(rng, valid))
    least = MESSAGES  # all of who does not know the token, and most of the other's
    eventually(lambda: producer.stats().dropped > 1.5 * least, "noise was not counted")
    producer.put(key("a"), [torch.ones(9)], last=True)
    consumer.open("a", producer.address)
    assert torch.equal(consumer.get(key("a"), PATIENCE_S).parts[0], torch.ones(9))


def test_a_stranger_reads_and_forgets_nothing(producer: TcpProducer, raw: Any) -> None:
    producer.put(key("a"), [torch.ones(9)])
    stranger = raw(zmq.DEALER)
    stranger.connect(parse(producer.address)[0])
    for message in (
        wire.Hello(token="0" * 32, edge=EDGE),
        wire.Open(request="a", window=0),
        wire.Forget(request="a"),
    ):
        stranger.send(wire.encode(message))
    assert stranger.poll(int(PATIENCE_S * 1000))
    assert isinstance(wire.TO_CONSUMER.decode(stranger.recv()), wire.Refused)
    eventually(lambda: producer.stats().dropped == 3, "it was not counted")
    assert stranger.poll(200) == 0 and producer.stats().chunks == 1


def test_a_frame_that_is_too_long_ends_the_connection(producer: TcpProducer, raw: Any) -> None:
    enemy = raw(zmq.DEALER)
    enemy.reconnect_ivl = -1
    monitor = enemy.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    enemy.connect(parse(producer.address)[0])
    enemy.send(bytes(wire.MAX_MESSAGE_BYTES + 1))
    assert monitor.poll(int(PATIENCE_S * 1000))
    assert producer.stats().dropped == 0


def test_bytes_that_are_no_zmtp(producer: TcpProducer, consumer: TcpConsumer) -> None:
    host, _, port = parse(producer.address)[0].removeprefix("tcp://").rpartition(":")
    for _ in range(50):
        with socket.create_connection((host, int(port))) as enemy:
            enemy.sendall(os.urandom(500))
    producer.put(key("a"), [b"x"])
    consumer.open("a", producer.address)
    assert bytes(consumer.get(key("a"), PATIENCE_S).parts[0]) == b"x"


def lies() -> list[list[bytes]]:
    """What a producer could send that does not fit together."""
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


def test_a_lying_producer_gets_nothing_into_a_consumer(consumer: TcpConsumer, raw: Any) -> None:
    liar = raw(zmq.ROUTER)
    port = liar.bind_to_random_port("tcp://127.0.0.1")
    consumer.open("a", f"tcp://127.0.0.1:{port}#{'0' * 32}")
    peer, _ = liar.recv_multipart()
    liar.recv_multipart()
    sent = lies()
    for frames in sent:
        liar.send_multipart([peer, *frames])
    eventually(lambda: consumer.stats().dropped == len(sent) - 1, "a lie was believed")  # one of them is a real head
    assert consumer.stats().chunks == 0
    liar.send_multipart([peer, wire.encode(wire.Slice(request="a", index=0, start=0)), bytes(16)])
    assert torch.equal(consumer.get(key("a"), PATIENCE_S).parts[0], torch.zeros(4))


def test_a_consumer_that_does_not_read_gets_no_more(producer: TcpProducer) -> None:
    with Tcp(replace(CONFIG, window_bytes=MIB)).consumer(EDGE) as slow:
        slow.open("a", producer.address)
        for index in range(40):
            producer.put(key("a", index), [torch.full((MIB // 4,), index, dtype=torch.uint8)], last=index == 39)
        eventually(lambda: slow.stats().held_bytes == MIB, "not as much was sent as may be")
        time.sleep(0.2)
        assert slow.stats().held_bytes == MIB
        assert slow.get(key("a", 39)).last, "what is asked for comes, whatever nobody has read"
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


def test_a_chunk_of_several_slices_and_parts(producer: TcpProducer, consumer: TcpConsumer) -> None:
    parts = [
        torch.randint(0, 255, (2 * SLICE_BYTES + 5,), dtype=torch.uint8),
        torch.arange(3),
        torch.randn(SLICE_BYTES),
    ]
    producer.put(key("a"), parts)
    consumer.open("a", producer.address)
    got = consumer.get(key("a"), PATIENCE_S).parts
    assert all(torch.equal(one, other) for one, other in zip(parts, got, strict=True))


def test_another_edge_is_refused(producer: TcpProducer) -> None:
    with Tcp(CONFIG).consumer("other") as other:
        other.open("a", producer.address)
        with pytest.raises(ProducerLost, match="edge 'hidden_states', not 'other'"):
            other.get(replace(key("a"), edge="other"), PATIENCE_S)


def test_a_port_in_use(producer: TcpProducer) -> None:
    port = int(parse(producer.address)[0].rpartition(":")[2])
    with pytest.raises(ConnectorError, match="cannot listen on"):
        Tcp(replace(CONFIG, port=port)).producer(EDGE)


@pytest.fixture
def closed() -> Iterator[TcpProducer]:
    """A producer with keys that has one chunk."""
    with Tcp(replace(CONFIG, listening=KEYS.listening)).producer(EDGE) as made:
        made.put(key("a"), [torch.ones(9)], last=True)
        yield made


@pytest.mark.parametrize("options", [{}, OTHER.connecting], ids=["no keys", "other keys"])
def test_who_has_the_address_and_not_the_keys_gets_nothing(closed: TcpProducer, raw: Any, options: Any) -> None:
    endpoint, token = parse(closed.address)
    enemy = raw(zmq.DEALER)
    enemy.linger = 0
    for option, value in options.items():
        enemy.setsockopt(option, value)
    enemy.connect(endpoint)
    enemy.send(wire.encode(wire.Hello(token=token, edge=EDGE)))
    enemy.send(wire.encode(wire.Open(request="a", window=MIB)))
    assert not enemy.poll(QUIET_MS)
    with Tcp(replace(CONFIG, connecting=options)).consumer(EDGE) as consumer:
        consumer.open("a", closed.address)
        with pytest.raises(ProducerLost):
            consumer.get(key("a"), PATIENCE_S)
    with Tcp(replace(CONFIG, connecting=KEYS.connecting)).consumer(EDGE) as member:
        member.open("a", closed.address)
        assert torch.equal(member.get(key("a"), PATIENCE_S).parts[0], torch.ones(9))


def test_a_false_producer_gets_no_message(raw: Any) -> None:
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
