"""The ends of an edge in two workers: what is put is taken, once and in order, whatever happens in between."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from vllm_omni_ext.config.connectors import DEFAULTS
from vllm_omni_ext.config.schema import SENDS, TAKES
from vllm_omni_ext.connectors.base import ConnectorConfig
from vllm_omni_ext.connectors.registry import connector
from vllm_omni_ext.engine.edges import Lost, Sender, Taker, sender_of, taker_of
from vllm_omni_ext.engine.exporter import Cut
from vllm_omni_ext.wire.enrollment import Enrollment
from vllm_omni_ext.wire.rows import Given, Notice

EDGE, WIDTH = "rows", 5
SECOND = 1.0

Ends = Callable[[], tuple[Sender, Taker]]


@pytest.fixture(params=["in_process", "shared_memory", "tcp"])
def name(request: Any) -> str:
    return str(request.param)


@pytest.fixture
def sender(name: str) -> Iterator[Sender]:
    made = make_sender(name)
    yield made
    close(made)


@pytest.fixture
def other(name: str) -> Iterator[Sender]:
    made = make_sender(name)
    yield made
    close(made)


@pytest.fixture
def taker(name: str) -> Iterator[Taker]:
    made = make_taker(name)
    yield made
    close(made)


def make_sender(name: str, **settings: Any) -> Sender:
    return sender_of({SENDS: {EDGE: {"name": name, **DEFAULTS, "capacity_bytes": 1 << 20, **settings}}})


def make_taker(name: str, **settings: Any) -> Taker:
    return taker_of({TAKES: {EDGE: {"name": name, **DEFAULTS, "capacity_bytes": 1 << 20, **settings}}})


def close(end: Any) -> None:
    opened = end._producer if isinstance(end, Sender) else end._consumer
    if opened is not None:
        opened.close()


def rows(first: int, stop: int) -> torch.Tensor:
    return torch.arange(first * WIDTH, stop * WIDTH, dtype=torch.float32).view(-1, WIDTH)


def cut(first: int, stop: int, last: bool = False) -> Cut:
    return Cut(first, rows(first, stop), last)


def send(sender: Sender, req_id: str, first: int, stop: int, last: bool = False) -> Notice:
    notice = sender.send(req_id, cut(first, stop, last))
    assert notice is not None and not notice.failed
    assert (notice.first, notice.count) == (first, stop - first)
    return notice


def given(notice: Notice) -> Given:
    return Given(source=notice.source, name=notice.name, count=notice.first + notice.count)


def taken(taker: Taker, req_id: str) -> list[float]:
    found = taker.take([req_id]).get(req_id, [])
    assert not isinstance(found, Lost), found
    return [] if not found else torch.cat(found)[:, 0].tolist()


def lost(taker: Taker, req_id: str) -> str:
    found = taker.take([req_id])[req_id]
    assert isinstance(found, Lost)
    return found.reason


def first_values(first: int, stop: int) -> list[float]:
    return [float(i * WIDTH) for i in range(first, stop)]


def empty(sender: Sender, within_s: float = 5.0) -> bool:
    deadline = time.monotonic() + within_s
    while sender.held() and time.monotonic() < deadline:
        time.sleep(0.1)
    return not sender.held()


def test_nothing_is_opened_before_it_is_needed(sender: Sender, taker: Taker) -> None:
    before = threading.active_count()
    assert taker.take(["text"]) == {}
    taker.forget("text")
    sender.ended("text")
    sender.forget(["0/text"])
    assert not sender.opened and not taker.opened
    assert sender.held() == 0 and threading.active_count() == before


def test_rows_come_as_they_were_put(sender: Sender, taker: Taker) -> None:
    taker.given("r", given(send(sender, "r", 0, 3)))
    assert taken(taker, "r") == first_values(0, 3)
    assert taken(taker, "r") == []
    send(sender, "r", 3, 4)
    taker.given("r", given(send(sender, "r", 4, 9, last=True)))
    assert taken(taker, "r") == first_values(3, 9)
    sender.ended("r")
    assert sender.held() == 1, "who takes over needs them again"
    taker.forget("r")
    assert empty(sender) and len(taker) == 0


def test_requests_do_not_mix(sender: Sender, other: Sender, taker: Taker) -> None:
    taker.given("a", given(send(sender, "a", 0, 2)))
    taker.given("b", given(send(other, "b", 0, 3)))
    taker.given("c", given(send(sender, "c", 0, 4)))
    found = taker.take(["b", "text", "a", "c"])
    values = {k: torch.cat(v)[:, 0].tolist() for k, v in found.items() if not isinstance(v, Lost)}
    assert values == {"a": first_values(0, 2), "b": first_values(0, 3), "c": first_values(0, 4)}


def test_a_second_reader_gets_everything_after_the_first_has_died(name: str, sender: Sender, taker: Taker) -> None:
    first = make_taker(name)
    notice = given(send(sender, "r", 0, 4, last=True))
    first.given("r", notice)
    assert taken(first, "r") == first_values(0, 4)
    close(first)
    taker.given("r", notice)
    assert taken(taker, "r") == first_values(0, 4)


def test_rows_that_are_exported_anew_are_taken_once(sender: Sender, other: Sender, taker: Taker) -> None:
    """In other pieces, by another replica."""
    taker.given("r", given(send(sender, "r", 0, 3)))
    assert taken(taker, "r") == first_values(0, 3)
    close(sender)
    send(other, "r", 0, 2)
    taker.given("r", given(send(other, "r", 2, 5)))
    assert taken(taker, "r") == first_values(3, 5)


def test_an_id_that_comes_again_is_another_request(sender: Sender, taker: Taker) -> None:
    old = send(sender, "r", 0, 3)
    sender.ended("r")
    new = send(sender, "r", 0, 2, last=True)
    assert (old.source, old.name) != (new.source, new.name)
    taker.given("r", given(new))
    assert taken(taker, "r") == first_values(0, 2)


def test_long_ids_are_told_apart(sender: Sender, other: Sender, taker: Taker) -> None:
    """vLLM makes ids unique at their end, and two replicas count alike."""
    one, two = "x" * 600 + "-1", "x" * 600 + "-2"
    taker.given(one, given(send(sender, one, 0, 1)))
    taker.given(two, given(send(other, two, 0, 2)))
    assert (taken(taker, one), taken(taker, two)) == (first_values(0, 1), first_values(0, 2))


def test_what_ended_before_all_rows_were_there_is_forgotten(sender: Sender) -> None:
    send(sender, "r", 0, 3)
    sender.ended("r")
    assert empty(sender)


def test_rows_nobody_will_take_are_forgotten(sender: Sender) -> None:
    notice = send(sender, "r", 0, 3, last=True)
    sender.ended("r")
    sender.forget([notice.name, "unknown"])
    assert empty(sender)


def test_a_request_that_is_forgotten_while_it_goes_on_is_silent(sender: Sender) -> None:
    notice = send(sender, "r", 0, 3)
    sender.forget([notice.name])
    assert sender.send("r", cut(3, 4)) is None


def test_a_producer_that_dies_is_noticed_at_once(sender: Sender, taker: Taker) -> None:
    notice = given(send(sender, "r", 0, 3))
    close(sender)
    taker.given("r", notice)
    began = time.monotonic()
    assert lost(taker, "r")
    assert time.monotonic() - began < SECOND


def test_a_chunk_that_does_not_come_is_noticed_in_time(sender: Sender, taker: Taker) -> None:
    notice = send(sender, "r", 0, 3)
    taker.given("r", Given(source=notice.source, name=notice.name, count=4))
    taker.given("other", given(send(sender, "other", 0, 2)))
    began = time.monotonic()
    found = taker.take(["r", "other"])
    assert time.monotonic() - began < SECOND
    assert isinstance(found["r"], Lost) and "did not come in time" in found["r"].reason
    assert isinstance(found["other"], list), "it is not drawn into it"


def test_what_does_not_fit_fails_this_request_alone(name: str) -> None:
    sender = make_sender(name, capacity_bytes=3 * WIDTH * 4 + 64)
    send(sender, "a", 0, 3, last=True)
    refused = sender.send("b", cut(0, 4))
    assert refused is not None and "capacity_bytes" in refused.failed and refused.count == 0
    sender.ended("b")
    close(sender)


def test_who_cannot_listen_says_so() -> None:
    sender = make_sender("tcp", host="192.0.2.1")
    refused = sender.send("r", cut(0, 1))
    assert refused is not None and "cannot listen on tcp://192.0.2.1" in refused.failed


def test_a_crews_replica_listens_where_its_crew_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    enrolled = Enrollment(stage="thinker", index=0, instance="i", host="127.0.0.2")
    for key, value in enrolled.variable().items():
        monkeypatch.setenv(key, value)
    for settings, host in (({}, "127.0.0.2"), ({"host": "127.0.0.3"}, "127.0.0.3")):
        sender = make_sender("tcp", **settings)
        assert send(sender, "r", 0, 1).source.startswith(f"tcp://{host}:")
        close(sender)


def test_settings_become_a_config() -> None:
    assert connector(ConnectorConfig(name="tcp", **DEFAULTS)).config.deadline_s == DEFAULTS["deadline_s"]
