"""The ends of an edge in two workers: what is put is taken, once and in order, whatever happens in between."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.support.pace import pace
from vllm_omni_ext.config.connectors import DEFAULTS
from vllm_omni_ext.config.schema import INCOMING, OUTGOING
from vllm_omni_ext.connectors.base import ConnectorConfig
from vllm_omni_ext.connectors.registry import connector
from vllm_omni_ext.engine.edges import EdgeReceiver, EdgeSender, Lost, edge_receiver, edge_sender
from vllm_omni_ext.engine.exporter import ExportedSlice
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.wire.envelope import HiddenStatesChunkReady
from vllm_omni_ext.wire.replica_identity import ReplicaIdentity
from vllm_omni_ext.wire.stage_input import HiddenStatesRef

EDGE, WIDTH = "hidden_states", 5
SECOND = 1.0

Ends = Callable[[], tuple[EdgeSender, EdgeReceiver]]


@pytest.fixture(params=["tests.connectors.in_process:InProcess", "shared_memory", "tcp"])
def name(request: Any) -> str:
    return str(request.param)


@pytest.fixture
def sender(name: str) -> Iterator[EdgeSender]:
    made = make_sender(name)
    yield made
    close(made)


@pytest.fixture
def other(name: str) -> Iterator[EdgeSender]:
    made = make_sender(name)
    yield made
    close(made)


@pytest.fixture
def receiver(name: str) -> Iterator[EdgeReceiver]:
    made = make_receiver(name)
    yield made
    close(made)


def make_sender(name: str, **settings: Any) -> EdgeSender:
    return edge_sender({OUTGOING: {EDGE: {"name": name, **DEFAULTS, "capacity_bytes": 1 << 20, **settings}}})


def make_receiver(name: str, **settings: Any) -> EdgeReceiver:
    return edge_receiver({INCOMING: {EDGE: {"name": name, **DEFAULTS, "capacity_bytes": 1 << 20, **settings}}})


def close(end: Any) -> None:
    opened = end._producer if isinstance(end, EdgeSender) else end._consumer
    if opened is not None:
        opened.close()


def states(first: int, stop: int) -> torch.Tensor:
    return torch.arange(first * WIDTH, stop * WIDTH, dtype=torch.float32).view(-1, WIDTH)


def cut(first: int, stop: int, last: bool = False) -> ExportedSlice:
    return ExportedSlice(first, states(first, stop), last)


def send(sender: EdgeSender, req_id: str, first: int, stop: int, last: bool = False) -> HiddenStatesChunkReady:
    notice = sender.send(req_id, cut(first, stop, last))
    assert notice is not None and not notice.failed
    assert (notice.first, notice.count) == (first, stop - first)
    return notice


def ref_of(notice: HiddenStatesChunkReady) -> HiddenStatesRef:
    return HiddenStatesRef(source=notice.source, name=notice.name, count=notice.first + notice.count)


def taken(receiver: EdgeReceiver, req_id: str) -> list[float]:
    found = receiver.take([req_id]).get(req_id, [])
    assert not isinstance(found, Lost), found
    return [] if not found else torch.cat(found)[:, 0].tolist()


def lost(receiver: EdgeReceiver, req_id: str) -> str:
    found = receiver.take([req_id])[req_id]
    assert isinstance(found, Lost)
    return found.reason


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
    assert not sender.opened and not receiver.opened
    assert sender.held() == 0 and threading.active_count() == before


def test_hidden_states_arrive_in_order(sender: EdgeSender, receiver: EdgeReceiver) -> None:
    receiver.announce("r", ref_of(send(sender, "r", 0, 3)))
    assert taken(receiver, "r") == first_values(0, 3)
    assert taken(receiver, "r") == []
    send(sender, "r", 3, 4)
    receiver.announce("r", ref_of(send(sender, "r", 4, 9, last=True)))
    assert taken(receiver, "r") == first_values(3, 9)
    sender.ended("r")
    assert sender.held() == 1, "who takes over needs them again"
    receiver.forget("r")
    assert empty(sender) and len(receiver) == 0


def test_requests_do_not_mix(sender: EdgeSender, other: EdgeSender, receiver: EdgeReceiver) -> None:
    receiver.announce("a", ref_of(send(sender, "a", 0, 2)))
    receiver.announce("b", ref_of(send(other, "b", 0, 3)))
    receiver.announce("c", ref_of(send(sender, "c", 0, 4)))
    found = receiver.take(["b", "text", "a", "c"])
    values = {k: torch.cat(v)[:, 0].tolist() for k, v in found.items() if not isinstance(v, Lost)}
    assert values == {"a": first_values(0, 2), "b": first_values(0, 3), "c": first_values(0, 4)}


def test_a_second_reader_gets_everything_after_the_first_has_died(
    name: str, sender: EdgeSender, receiver: EdgeReceiver
) -> None:
    first = make_receiver(name)
    notice = ref_of(send(sender, "r", 0, 4, last=True))
    first.announce("r", notice)
    assert taken(first, "r") == first_values(0, 4)
    close(first)
    receiver.announce("r", notice)
    assert taken(receiver, "r") == first_values(0, 4)


def test_hidden_states_exported_twice_are_taken_once(
    sender: EdgeSender, other: EdgeSender, receiver: EdgeReceiver
) -> None:
    """In other pieces, by another replica."""
    receiver.announce("r", ref_of(send(sender, "r", 0, 3)))
    assert taken(receiver, "r") == first_values(0, 3)
    close(sender)
    send(other, "r", 0, 2)
    receiver.announce("r", ref_of(send(other, "r", 2, 5)))
    assert taken(receiver, "r") == first_values(3, 5)


def test_an_id_that_comes_again_is_another_request(sender: EdgeSender, receiver: EdgeReceiver) -> None:
    old = send(sender, "r", 0, 3)
    sender.ended("r")
    new = send(sender, "r", 0, 2, last=True)
    assert (old.source, old.name) != (new.source, new.name)
    receiver.announce("r", ref_of(new))
    assert taken(receiver, "r") == first_values(0, 2)


def test_long_ids_stay_distinct(sender: EdgeSender, other: EdgeSender, receiver: EdgeReceiver) -> None:
    """vLLM makes ids unique at their end, and two replicas count alike."""
    one, two = "x" * 600 + "-1", "x" * 600 + "-2"
    receiver.announce(one, ref_of(send(sender, one, 0, 1)))
    receiver.announce(two, ref_of(send(other, two, 0, 2)))
    assert (taken(receiver, one), taken(receiver, two)) == (first_values(0, 1), first_values(0, 2))


def test_hidden_states_of_a_request_that_ended_early_are_dropped(sender: EdgeSender) -> None:
    send(sender, "r", 0, 3)
    sender.ended("r")
    assert empty(sender)


def test_unclaimed_hidden_states_are_freed(sender: EdgeSender) -> None:
    notice = send(sender, "r", 0, 3, last=True)
    sender.ended("r")
    sender.forget([notice.name, "unknown"])
    assert empty(sender)


def test_dropped_request_announces_no_more_hidden_states(sender: EdgeSender) -> None:
    notice = send(sender, "r", 0, 3)
    sender.forget([notice.name])
    assert sender.send("r", cut(3, 4)) is None


def test_a_producer_that_dies_is_noticed_at_once(sender: EdgeSender, receiver: EdgeReceiver) -> None:
    notice = ref_of(send(sender, "r", 0, 3))
    close(sender)
    receiver.announce("r", notice)
    began = time.monotonic()
    assert lost(receiver, "r")
    assert time.monotonic() - began < SECOND * pace()


def test_a_chunk_that_does_not_come_is_noticed_in_time(sender: EdgeSender, receiver: EdgeReceiver) -> None:
    notice = send(sender, "r", 0, 3)
    receiver.announce("r", HiddenStatesRef(source=notice.source, name=notice.name, count=4))
    receiver.announce("other", ref_of(send(sender, "other", 0, 2)))
    began = time.monotonic()
    found = receiver.take(["r", "other"])
    assert time.monotonic() - began < SECOND * pace()
    assert isinstance(found["r"], Lost) and "did not come in time" in found["r"].reason
    assert isinstance(found["other"], list), "it is not drawn into it"


def test_what_another_worker_lost_is_lost_here_too(sender: EdgeSender, receiver: EdgeReceiver) -> None:
    """Or one of the workers that compute together would go on with zeros, which nobody hears of."""
    own: list[dict[str, str]] = []

    def lost_anywhere(lost: dict[str, str]) -> dict[str, str]:
        own.append(lost)
        return {"r": "too late there"}

    for req_id in ("r", "other"):
        receiver.announce(req_id, ref_of(send(sender, req_id, 0, 2)))
    found = receiver.take(["r", "other"], lost_anywhere=lost_anywhere)
    assert found["r"] == Lost("too late there") and isinstance(found["other"], list)
    assert receiver.take(["r", "other"], lost_anywhere=lost_anywhere) == {}
    assert own == [{}], "only steps with new hidden states are talked about, which are the same in all workers"


def test_hidden_states_beyond_the_capacity_fail_only_their_request(name: str) -> None:
    sender = make_sender(name, capacity_bytes=3 * WIDTH * 4 + 64)
    send(sender, "a", 0, 3, last=True)
    refused = sender.send("b", cut(0, 4))
    assert refused is not None and "capacity_bytes" in refused.failed and refused.count == 0
    sender.ended("b")
    close(sender)


def test_sender_without_a_listening_address_raises_a_clear_error() -> None:
    sender = make_sender("tcp", host="192.0.2.1")
    refused = sender.send("r", cut(0, 1))
    assert refused is not None and "cannot listen on tcp://192.0.2.1" in refused.failed


def test_headless_replica_listens_on_the_address_of_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    enrolled = ReplicaIdentity(stage="thinker", index=0, instance="i", host="127.0.0.2")
    for key, value in enrolled.variable().items():
        monkeypatch.setenv(key, value)
    for settings, host in (({}, "127.0.0.2"), ({"host": "127.0.0.3"}, "127.0.0.3")):
        sender = make_sender("tcp", **settings)
        assert send(sender, "r", 0, 1).source.startswith(f"tcp://{host}:")
        close(sender)


def test_settings_become_a_config() -> None:
    assert connector(ConnectorConfig(name="tcp", **DEFAULTS)).config.timeout_s == DEFAULTS["timeout_s"]


def test_edges_are_found_by_name() -> None:
    """Several tensor edges may begin or end at a stage; only a single one needs no name."""
    settings = {"name": "tests.connectors.in_process:InProcess", **DEFAULTS}
    two = {
        OUTGOING: {"hidden_states": settings, "latents": settings},
        INCOMING: {"hidden_states": settings, "latents": settings},
    }
    for make in (edge_sender, edge_receiver):
        assert make(two, "latents")._edge == "latents"
        with pytest.raises(ConfigError, match="over hidden_states, latents; its worker needs one edge"):
            make(two)
        with pytest.raises(ConfigError, match="needs pictures"):
            make(two, "pictures")
        with pytest.raises(ConfigError, match="over none"):
            make({})
