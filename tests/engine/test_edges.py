"""Both ends of an edge in two workers: hidden states are taken once and in order, also after a failover."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from queue import Queue
from typing import Any

import pytest
import torch

from tests.support.pace import pace
from vllm_omni_ext.config.connectors import DEFAULTS
from vllm_omni_ext.config.schema import INCOMING, OUTGOING
from vllm_omni_ext.engine.edge_receiver import Arrival, Lost
from vllm_omni_ext.engine.edges import EdgeSender, edge_receiver, edge_sender
from vllm_omni_ext.engine.exporter import ExportedSlice
from vllm_omni_ext.engine.replica_identity import ReplicaIdentity
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.wire.stage_input import HiddenStatesRef

EDGE, WIDTH = "hidden_states", 5
SECOND = 1.0
PATIENCE_S = 20.0


@pytest.fixture(params=["shared_memory", "tcp"])
def name(request: Any) -> str:
    return str(request.param)


def make_sender(name: str, **settings: Any) -> EdgeSender:
    return edge_sender({OUTGOING: {EDGE: {"name": name, **DEFAULTS, "capacity_bytes": 1 << 20, **settings}}})


class Receiving:
    """A receiver, and its arrivals by request."""

    def __init__(self, name: str) -> None:
        self._woken: Queue[None] = Queue()
        settings = {EDGE: {"name": name, **DEFAULTS, "capacity_bytes": 1 << 20}}
        self.receiver = edge_receiver({INCOMING: settings}, wake=lambda: self._woken.put(None))
        self.announce, self.forget = self.receiver.announce, self.receiver.forget

    def take(self, count: int) -> list[Arrival]:
        """Wait for `count` arrivals."""
        for _ in range(count):
            self._woken.get(timeout=PATIENCE_S)
        return self.receiver.arrivals()

    def values(self) -> list[float]:
        """Wait for hidden states; return the first number of each."""
        (arrival,) = self.take(1)
        assert isinstance(arrival.found, torch.Tensor), arrival
        return [float(value) for value in arrival.found[:, 0]]


@pytest.fixture
def sender(name: str) -> Iterator[EdgeSender]:
    yield (made := make_sender(name))
    close(made)


@pytest.fixture
def other(name: str) -> Iterator[EdgeSender]:
    yield (made := make_sender(name))
    close(made)


@pytest.fixture
def receiver(name: str) -> Iterator[Receiving]:
    yield (made := Receiving(name))
    made.receiver.close()


def close(sender: EdgeSender) -> None:
    if sender._producer is not None:
        sender._producer.close()


def cut(first: int, stop: int, last: bool = False) -> ExportedSlice:
    states = torch.arange(first * WIDTH, stop * WIDTH, dtype=torch.float32).view(-1, WIDTH)
    return ExportedSlice(first, states, last)


def send(sender: EdgeSender, req_id: str, first: int, stop: int, last: bool = False) -> HiddenStatesRef:
    notice = sender.send(req_id, cut(first, stop, last))
    assert notice is not None and not notice.failed
    assert (notice.first, notice.count) == (first, stop - first)
    return HiddenStatesRef(source=notice.source, name=notice.name, count=stop)


def first_values(first: int, stop: int) -> list[float]:
    return [float(i * WIDTH) for i in range(first, stop)]


def empty(sender: EdgeSender, within_s: float = 5.0) -> bool:
    deadline = time.monotonic() + within_s
    while sender.held() and time.monotonic() < deadline:
        time.sleep(0.1)
    return not sender.held()


def test_nothing_is_opened_before_it_is_needed(sender: EdgeSender, receiver: Receiving) -> None:
    before = threading.active_count()
    assert receiver.take(0) == []
    receiver.forget("text")
    sender.ended("text")
    sender.forget(["0/text"])
    assert sender.held() is None and receiver.receiver.held() == 0 and threading.active_count() == before


def test_hidden_states_arrive_in_order(sender: EdgeSender, receiver: Receiving) -> None:
    notice = send(sender, "r", 0, 3)
    receiver.announce("r", notice)
    receiver.announce("r", notice)
    assert receiver.values() == first_values(0, 3)
    send(sender, "r", 3, 4)
    receiver.announce("r", send(sender, "r", 4, 9, last=True))
    assert receiver.values() == first_values(3, 9)
    assert receiver.take(0) == []
    sender.ended("r")
    assert sender.held() == 1, "another replica may take the request over"
    receiver.forget("r")
    assert empty(sender) and receiver.receiver.held() == 0


def test_a_second_receiver_takes_everything_again(name: str, sender: EdgeSender, receiver: Receiving) -> None:
    first = Receiving(name)
    notice = send(sender, "r", 0, 4, last=True)
    first.announce("r", notice)
    assert first.values() == first_values(0, 4)
    first.receiver.close()
    receiver.announce("r", notice)
    assert receiver.values() == first_values(0, 4)


def test_hidden_states_exported_twice_are_taken_once(
    sender: EdgeSender, other: EdgeSender, receiver: Receiving
) -> None:
    """In other pieces, by another replica."""
    receiver.announce("r", send(sender, "r", 0, 3))
    assert receiver.values() == first_values(0, 3)
    close(sender)
    receiver.announce("r", send(other, "r", 0, 2))
    receiver.announce("r", send(other, "r", 2, 5))
    (arrival,) = receiver.take(1)
    assert arrival.count == 5 and isinstance(arrival.found, torch.Tensor)
    assert arrival.found[:, 0].tolist() == first_values(3, 5)


def test_requests_are_not_mixed(sender: EdgeSender, other: EdgeSender, receiver: Receiving) -> None:
    """Also long ids, which vLLM makes unique at their end, and an id that is used again."""
    one, two = "x" * 600 + "-1", "x" * 600 + "-2"
    receiver.announce(one, send(sender, one, 0, 1))
    receiver.announce(two, send(other, two, 0, 2))
    old = send(sender, "again", 0, 4)
    sender.ended("again")
    new = send(sender, "again", 0, 3, last=True)
    assert (old.source, old.name) != (new.source, new.name)
    receiver.announce("again", new)
    values = {each.req_id: each.found[:, 0].tolist() for each in receiver.take(3) if not isinstance(each.found, Lost)}
    assert values == {one: first_values(0, 1), two: first_values(0, 2), "again": first_values(0, 3)}


def test_hidden_states_that_no_receiver_takes_are_freed(sender: EdgeSender) -> None:
    send(sender, "ended early", 0, 3)
    sender.ended("ended early")
    assert empty(sender)
    notice = send(sender, "orphaned", 0, 3)
    sender.forget([notice.name, "unknown"])
    assert sender.send("orphaned", cut(3, 4)) is None and empty(sender)


def test_hidden_states_of_a_dead_producer_are_lost_at_once(sender: EdgeSender, receiver: Receiving) -> None:
    notice = send(sender, "r", 0, 3)
    close(sender)
    began = time.monotonic()
    receiver.announce("r", notice)
    (arrival,) = receiver.take(1)
    assert isinstance(arrival.found, Lost) and arrival.count == sys.maxsize
    assert time.monotonic() - began < SECOND * pace()


def test_a_missing_chunk_is_lost(sender: EdgeSender, receiver: Receiving) -> None:
    notice = send(sender, "r", 0, 3)
    receiver.announce("r", HiddenStatesRef(source=notice.source, name=notice.name, count=4))
    receiver.announce("other", send(sender, "other", 0, 2))
    lost, other = receiver.take(2)
    assert isinstance(lost.found, Lost) and "never put" in lost.found.reason
    assert isinstance(other.found, torch.Tensor), "the other request has its hidden states"


def test_an_error_of_the_connector_fails_only_its_request(name: str) -> None:
    sender = make_sender(name, capacity_bytes=3 * WIDTH * 4 + 64)
    send(sender, "a", 0, 3, last=True)
    refused = sender.send("b", cut(0, 4))
    assert refused is not None and "capacity_bytes" in refused.failed and refused.count == 0
    sender.ended("b")
    close(sender)
    refused = make_sender("tcp", host="192.0.2.1").send("r", cut(0, 1))
    assert refused is not None and "cannot listen on tcp://192.0.2.1" in refused.failed


def test_headless_replica_listens_on_the_address_of_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    enrolled = ReplicaIdentity(stage="thinker", index=0, host="127.0.0.2")
    for key, value in enrolled.variable().items():
        monkeypatch.setenv(key, value)
    for settings, host in (({}, "127.0.0.2"), ({"host": "127.0.0.3"}, "127.0.0.3")):
        sender = make_sender("tcp", **settings)
        assert send(sender, "r", 0, 1).source.startswith(f"tcp://{host}:")
        close(sender)


def test_edges_are_found_by_name() -> None:
    """Several tensor edges may begin or end at a stage; only a single one needs no name."""
    settings = {"name": "shared_memory", **DEFAULTS}
    two = {key: {"hidden_states": settings, "latents": settings} for key in (OUTGOING, INCOMING)}
    for make in (edge_sender, partial(edge_receiver, wake=lambda: None)):
        assert make(two, "latents")._edge == "latents"
        with pytest.raises(ConfigError, match="over hidden_states, latents; its worker needs one edge"):
            make(two)
        with pytest.raises(ConfigError, match="needs pictures"):
            make(two, "pictures")
        with pytest.raises(ConfigError, match="over none"):
            make({})
