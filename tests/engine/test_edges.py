"""Both ends of an edge in two workers: hidden states are taken once and in order, also after a failover."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support.pace import pace
from vllm_omni_ext.config.connectors import DEFAULTS
from vllm_omni_ext.config.schema import INCOMING, OUTGOING
from vllm_omni_ext.engine.edges import EdgeReceiver, EdgeSender, Lost, edge_receiver, edge_sender
from vllm_omni_ext.engine.exporter import ExportedSlice
from vllm_omni_ext.engine.replica_identity import ReplicaIdentity
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.wire.stage_input import HiddenStatesRef

EDGE, WIDTH = "hidden_states", 5
SECOND = 1.0


@pytest.fixture(params=["shared_memory", "tcp"])
def name(request: Any) -> str:
    return str(request.param)


def make_sender(name: str, **settings: Any) -> EdgeSender:
    return edge_sender({OUTGOING: {EDGE: {"name": name, **DEFAULTS, "capacity_bytes": 1 << 20, **settings}}})


def make_receiver(name: str) -> EdgeReceiver:
    return edge_receiver({INCOMING: {EDGE: {"name": name, **DEFAULTS, "capacity_bytes": 1 << 20}}})


@pytest.fixture
def sender(name: str) -> Iterator[EdgeSender]:
    yield (made := make_sender(name))
    close(made)


@pytest.fixture
def other(name: str) -> Iterator[EdgeSender]:
    yield (made := make_sender(name))
    close(made)


@pytest.fixture
def receiver(name: str) -> Iterator[EdgeReceiver]:
    yield (made := make_receiver(name))
    close(made)


def close(end: Any) -> None:
    opened = end._producer if isinstance(end, EdgeSender) else end._consumer
    if opened is not None:
        opened.close()


def cut(first: int, stop: int, last: bool = False) -> ExportedSlice:
    states = torch.arange(first * WIDTH, stop * WIDTH, dtype=torch.float32).view(-1, WIDTH)
    return ExportedSlice(first, states, last)


def send(sender: EdgeSender, req_id: str, first: int, stop: int, last: bool = False) -> HiddenStatesRef:
    notice = sender.send(req_id, cut(first, stop, last))
    assert notice is not None and not notice.failed
    assert (notice.first, notice.count) == (first, stop - first)
    return HiddenStatesRef(source=notice.source, name=notice.name, count=stop)


def taken(receiver: EdgeReceiver, req_id: str) -> list[float]:
    found = receiver.take([req_id]).get(req_id, [])
    assert not isinstance(found, Lost), found
    return [] if not found else torch.cat(found)[:, 0].tolist()


def first_values(first: int, stop: int) -> list[float]:
    return [float(i * WIDTH) for i in range(first, stop)]


def empty(sender: EdgeSender, within_s: float = 5.0) -> bool:
    deadline = time.monotonic() + within_s
    while sender.held() and time.monotonic() < deadline:
        time.sleep(0.1)
    return not sender.held()


def test_nothing_is_opened_before_it_is_needed(sender: EdgeSender, receiver: EdgeReceiver) -> None:
    before = threading.active_count()
    assert receiver.take(["text"]) == {}
    receiver.forget("text")
    sender.ended("text")
    sender.forget(["0/text"])
    assert sender.held() is None and receiver.held() is None and threading.active_count() == before


def test_hidden_states_arrive_in_order(sender: EdgeSender, receiver: EdgeReceiver) -> None:
    receiver.announce("r", send(sender, "r", 0, 3))
    assert taken(receiver, "r") == first_values(0, 3)
    assert taken(receiver, "r") == []
    send(sender, "r", 3, 4)
    receiver.announce("r", send(sender, "r", 4, 9, last=True))
    assert taken(receiver, "r") == first_values(3, 9)
    sender.ended("r")
    assert sender.held() == 1, "another replica may take the request over"
    receiver.forget("r")
    assert empty(sender) and receiver.held() == 0


def test_a_second_receiver_takes_everything_again(name: str, sender: EdgeSender, receiver: EdgeReceiver) -> None:
    first = make_receiver(name)
    notice = send(sender, "r", 0, 4, last=True)
    first.announce("r", notice)
    assert taken(first, "r") == first_values(0, 4)
    close(first)
    receiver.announce("r", notice)
    assert taken(receiver, "r") == first_values(0, 4)


def test_hidden_states_exported_twice_are_taken_once(
    sender: EdgeSender, other: EdgeSender, receiver: EdgeReceiver
) -> None:
    """In other pieces, by another replica."""
    receiver.announce("r", send(sender, "r", 0, 3))
    assert taken(receiver, "r") == first_values(0, 3)
    close(sender)
    send(other, "r", 0, 2)
    receiver.announce("r", send(other, "r", 2, 5))
    assert taken(receiver, "r") == first_values(3, 5)


def test_requests_are_not_mixed(sender: EdgeSender, other: EdgeSender, receiver: EdgeReceiver) -> None:
    """Also long ids, which vLLM makes unique at their end, and an id that is used again."""
    one, two = "x" * 600 + "-1", "x" * 600 + "-2"
    receiver.announce(one, send(sender, one, 0, 1))
    receiver.announce(two, send(other, two, 0, 2))
    old = send(sender, "again", 0, 4)
    sender.ended("again")
    new = send(sender, "again", 0, 3, last=True)
    assert (old.source, old.name) != (new.source, new.name)
    receiver.announce("again", new)
    found = receiver.take([two, "text", one, "again"])
    values = {k: torch.cat(v)[:, 0].tolist() for k, v in found.items() if not isinstance(v, Lost)}
    assert values == {one: first_values(0, 1), two: first_values(0, 2), "again": first_values(0, 3)}


def test_hidden_states_that_no_receiver_takes_are_freed(sender: EdgeSender) -> None:
    send(sender, "ended early", 0, 3)
    sender.ended("ended early")
    assert empty(sender)
    notice = send(sender, "orphaned", 0, 3)
    sender.forget([notice.name, "unknown"])
    assert sender.send("orphaned", cut(3, 4)) is None and empty(sender)


def test_hidden_states_of_a_dead_producer_are_lost_at_once(sender: EdgeSender, receiver: EdgeReceiver) -> None:
    notice = send(sender, "r", 0, 3)
    close(sender)
    receiver.announce("r", notice)
    began = time.monotonic()
    assert isinstance(receiver.take(["r"])["r"], Lost)
    assert time.monotonic() - began < SECOND * pace()


def test_a_missing_chunk_is_lost(sender: EdgeSender, receiver: EdgeReceiver) -> None:
    notice = send(sender, "r", 0, 3)
    receiver.announce("r", HiddenStatesRef(source=notice.source, name=notice.name, count=4))
    receiver.announce("other", send(sender, "other", 0, 2))
    began = time.monotonic()
    found = receiver.take(["r", "other"])
    assert time.monotonic() - began < SECOND * pace()
    assert isinstance(found["r"], Lost) and "never put" in found["r"].reason
    assert isinstance(found["other"], list), "the other request has its hidden states"


def test_hidden_states_lost_for_one_worker_are_lost_for_all(sender: EdgeSender, receiver: EdgeReceiver) -> None:
    """Otherwise one of the workers would compute with zeros, and the engine reads another one."""
    own: list[dict[str, str]] = []

    def lost_anywhere(lost: dict[str, str]) -> dict[str, str]:
        own.append(lost)
        return {"r": "too late there"}

    for req_id in ("r", "other"):
        receiver.announce(req_id, send(sender, req_id, 0, 2))
    found = receiver.take(["r", "other"], lost_anywhere=lost_anywhere)
    assert found["r"] == Lost("too late there") and isinstance(found["other"], list)
    assert receiver.take(["r", "other"], lost_anywhere=lost_anywhere) == {}
    assert own == [{}], "called in steps with new hidden states, which are the same in all workers"


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
    for make in (edge_sender, edge_receiver):
        assert make(two, "latents")._edge == "latents"
        with pytest.raises(ConfigError, match="over hidden_states, latents; its worker needs one edge"):
            make(two)
        with pytest.raises(ConfigError, match="needs pictures"):
            make(two, "pictures")
        with pytest.raises(ConfigError, match="over none"):
            make({})
