"""Hidden states are read in threads of their sources; a source without a reply delays no other source."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from queue import Empty, Queue
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_omni_ext.connectors.base import Connector, ConnectorConfig, Consumer, DeadlinePassed, Producer, ProducerLost
from vllm_omni_ext.engine import edge_receiver
from vllm_omni_ext.engine.edge_receiver import IDLE_SOURCES, Arrival, EdgeReceiver, Lost
from vllm_omni_ext.wire.stage_input import HiddenStatesRef

PATIENCE_S = 20.0


@dataclass
class Replies:
    """Replies of the sources: chunks of `rows` hidden states each, [number of the chunk], or an error, when `open`."""

    open: dict[str, threading.Event] = field(default_factory=dict)
    errors: dict[str, Exception] = field(default_factory=dict)
    waits: list[float] = field(default_factory=list)
    asked: Queue[tuple[str, str, int]] = field(default_factory=Queue)
    freed: Queue[tuple[str, str]] = field(default_factory=Queue)
    closed: Queue[str] = field(default_factory=Queue)
    rows: int = 1


class Scripted(Consumer):
    def __init__(self, replies: Replies) -> None:
        self._replies = replies
        self._source = ""

    def get(self, source: str, request: str, index: int, timeout_s: float) -> torch.Tensor:
        self._source = source
        self._replies.waits.append(timeout_s)
        self._replies.asked.put((source, request, index))
        if source in self._replies.open:
            assert self._replies.open[source].wait(PATIENCE_S)
        if source in self._replies.errors:
            raise self._replies.errors[source]
        return torch.full((self._replies.rows, 1), float(index))

    def forget(self, source: str, request: str) -> None:
        self._source = source
        self._replies.freed.put((source, request))

    def close(self) -> None:
        self._replies.closed.put(self._source)


@dataclass(frozen=True)
class ScriptedConnector(Connector):
    replies: Replies

    def producer(self, edge: str) -> Producer:
        raise NotImplementedError

    def consumer(self, edge: str) -> Consumer:
        return Scripted(self.replies)


class World:
    def __init__(self, timeout_s: float = PATIENCE_S) -> None:
        self.replies = Replies()
        self._woken: Queue[None] = Queue()
        connector = ScriptedConnector(ConnectorConfig(name="scripted"), self.replies)
        self.receiver = EdgeReceiver("e", connector, timeout_s, lambda: self._woken.put(None))

    def announce(self, req_id: str, count: int, source: str = "one") -> None:
        self.receiver.announce(req_id, HiddenStatesRef(source=source, name=f"{source}/{req_id}", count=count))

    def take(self, count: int = 1) -> list[Arrival]:
        for _ in range(count):
            self._woken.get(timeout=PATIENCE_S)
        return self.receiver.arrivals()

    def numbers(self) -> tuple[str, int, list[float]]:
        (arrival,) = self.take()
        assert isinstance(arrival.found, torch.Tensor), arrival
        return arrival.req_id, arrival.count, arrival.found[:, 0].tolist()


@pytest.fixture
def world() -> Iterator[World]:
    yield (made := World())
    for each in made.replies.open.values():
        each.set()
    made.receiver.close()


def asked(world: World) -> tuple[str, str, int]:
    return world.replies.asked.get(timeout=PATIENCE_S)


def test_a_source_without_a_reply_delays_only_its_own_requests(world: World) -> None:
    world.replies.open["slow"] = threading.Event()
    world.announce("r", 2, "slow")
    assert asked(world) == ("slow", "slow/r", 0)
    for name in ("a", "b"):
        world.announce(name, 1, "fast")
        assert world.numbers() == (name, 1, [0.0])
    world.replies.open["slow"].set()
    assert world.numbers() == ("r", 2, [0.0, 1.0])


def test_hidden_states_are_read_once_while_more_are_announced(world: World) -> None:
    world.replies.open["one"] = threading.Event()
    for count in (1, 1, 3):
        world.announce("r", count)
    world.replies.open["one"].set()
    arrivals = world.take(2)
    assert [(each.count, each.found[:, 0].tolist()) for each in arrivals if not isinstance(each.found, Lost)] == [
        (1, [0.0]),
        (3, [1.0, 2.0]),
    ]


def test_a_count_may_end_within_a_chunk(world: World) -> None:
    """The rest of the chunk arrives with its beginning, so a later read of the rest has no arrival."""
    world.replies.rows = 3
    world.announce("r", 2)
    assert world.numbers() == ("r", 3, [0.0, 0.0, 0.0])
    world.announce("r", 3)
    world.announce("r", 4)
    assert world.numbers() == ("r", 6, [1.0, 1.0, 1.0])
    world.announce("next", 1)
    assert world.numbers()[0] == "next"


def test_a_late_reply_of_the_old_source_is_dropped(world: World) -> None:
    """The new source has the first hidden state in another chunk; it arrived from the old one."""
    world.announce("r", 1, "old")
    assert world.numbers() == ("r", 1, [0.0])
    world.replies.open["old"] = threading.Event()
    world.announce("r", 2, "old")
    assert [asked(world)[2] for _ in range(2)] == [0, 1]
    world.announce("r", 3, "new")
    assert world.numbers() == ("r", 3, [1.0, 2.0])
    world.replies.open["old"].set()
    assert world.take() == []
    assert world.replies.freed.get(timeout=PATIENCE_S) == ("old", "old/r")


def split(count: int, start: int, decode: str = "decode", before: HiddenStatesRef | None = None) -> HiddenStatesRef:
    """Hidden states of a prefill replica, and from `start` on of a decode replica."""
    first = HiddenStatesRef(source="prefill", name="prefill/r", count=start) if before is None else before
    return HiddenStatesRef(source=decode, name=f"{decode}/r", count=count, start=start, before=first)


def test_hidden_states_of_two_sources_arrive_in_order(world: World) -> None:
    """The second source is read when all of the first has arrived, also if it was announced before."""
    world.replies.open["prefill"] = threading.Event()
    world.announce("r", 3, "prefill")
    world.receiver.announce("r", split(4, 3))
    world.receiver.announce("r", split(5, 3))
    world.announce("next", 1, "decode")
    assert world.numbers() == ("next", 1, [0.0])
    world.replies.open["prefill"].set()
    assert world.numbers() == ("r", 3, [0.0, 1.0, 2.0])
    assert world.numbers() == ("r", 5, [0.0, 1.0])
    world.receiver.announce("r", split(6, 3))
    assert world.numbers() == ("r", 6, [2.0])
    assert world.replies.freed.empty()
    world.receiver.forget("r")
    freed = {world.replies.freed.get(timeout=PATIENCE_S) for _ in range(2)}
    assert freed == {("prefill", "prefill/r"), ("decode", "decode/r")}


@pytest.mark.parametrize("read", [0, 3, 5])
def test_two_sources_after_a_failover_continue_at_what_has_arrived(world: World, read: int) -> None:
    """The new prefill replica has exported prompt and reply so far, the new decode replica what follows."""
    if read:
        world.receiver.announce("r", split(read, 3))
        for _ in range(1 + (read > 3)):
            world.take()
    again = HiddenStatesRef(source="other", name="other/r", count=6)
    world.receiver.announce("r", again)
    world.receiver.announce("r", split(8, 6, "last", again))
    assert world.numbers() == ("r", 6, [float(i) for i in range(read, 6)])
    assert world.numbers() == ("r", 8, [0.0, 1.0])
    world.receiver.forget("r")
    freed = {world.replies.freed.get(timeout=PATIENCE_S) for _ in range(4 if read else 2)}
    assert {("other", "other/r"), ("last", "last/r")} <= freed


def test_a_location_that_is_used_again_delivers_nothing_twice(world: World) -> None:
    world.announce("r", 2, "prefill")
    assert world.numbers() == ("r", 2, [0.0, 1.0])
    world.receiver.announce("r", split(5, 2))
    assert world.numbers() == ("r", 5, [0.0, 1.0, 2.0])
    world.announce("r", 6, "prefill")
    assert world.numbers() == ("r", 6, [5.0])


@pytest.mark.parametrize("error", [ProducerLost("gone"), ValueError("no address"), KeyError("a bug")], ids=repr)
def test_a_request_with_lost_hidden_states_gets_no_more(world: World, error: Exception) -> None:
    """Any error ends the request: nothing else would end its wait."""
    world.replies.errors["one"] = error
    world.announce("r", 1)
    (arrival,) = world.take()
    assert (
        isinstance(arrival.found, Lost) and str(error.args[0]) in arrival.found.reason and arrival.count == sys.maxsize
    )
    world.announce("r", 2)
    world.announce("r", 4, "other")
    world.announce("next", 1, "other")
    assert world.numbers() == ("next", 1, [0.0])
    assert world.receiver.held() == 2
    world.receiver.forget("r")
    del world.replies.errors["one"]
    world.announce("r", 1)
    assert world.numbers() == ("r", 1, [0.0]), "the id of an ended request is used again"


def test_requests_of_a_source_without_a_reply_have_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each of them would wait for the whole time, one after the other."""
    world, now = World(timeout_s=1.0), [100.0]
    monkeypatch.setattr(edge_receiver, "time", SimpleNamespace(monotonic=lambda: now[0]))
    world.replies.errors["one"] = DeadlinePassed("late")
    world.replies.open["one"] = threading.Event()
    for name in "abc":
        world.announce(name, 1)
    asked(world)
    now[0] += 1.5
    world.replies.open["one"].set()
    assert [type(each.found) for each in world.take(3)] == [Lost] * 3
    assert world.replies.waits == [1.0, 0.0, 0.0]
    del world.replies.errors["one"]
    world.announce("d", 2)
    assert world.numbers() == ("d", 2, [0.0, 1.0])
    assert world.replies.waits[3:] == [1.0, 1.0], "a later announcement has the whole time"
    world.receiver.close()


def test_hidden_states_of_an_ended_request_do_not_arrive(world: World) -> None:
    world.replies.open["one"] = threading.Event()
    world.announce("r", 1)
    asked(world)
    world.receiver.forget("r")
    world.replies.open["one"].set()
    assert world.take() == []
    assert world.replies.freed.get(timeout=PATIENCE_S) == ("one", "one/r")


def test_connections_without_a_request_are_limited(world: World) -> None:
    names = [str(number) for number in range(IDLE_SOURCES + 3)]
    for name in names:
        world.announce(name, 1, name)
        assert world.numbers()[0] == name
    with pytest.raises(Empty):
        world.replies.closed.get_nowait()
    for name in names:
        world.receiver.forget(name)
    world.announce("r", 1, "another")
    assert world.numbers()[0] == "r"
    closed = {world.replies.closed.get(timeout=PATIENCE_S) for _ in range(4)}
    assert closed == set(names[:4]), "those that were used least recently"
    world.receiver.close()
    assert len({world.replies.closed.get(timeout=PATIENCE_S) for _ in range(IDLE_SOURCES)}) == IDLE_SOURCES


def test_closing_ends_all_threads(world: World) -> None:
    def threads() -> list[Any]:
        return [each for each in threading.enumerate() if each.name == "omni-receiver-e"]

    before = set(threads())
    for name in "abc":
        world.announce(name, 1, name)
    world.take(3)
    opened = set(threads()) - before
    assert len(opened) == 3
    world.receiver.close()
    for each in opened:
        each.join(PATIENCE_S)
        assert not each.is_alive()
