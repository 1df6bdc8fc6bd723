"""Who waits for a stage, for how long, and whether anything may come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.orchestrator.waiting import Waiting

VOICE, OTHER_VOICE, SOUND = ReplicaId("voice", 0), ReplicaId("voice", 1), ReplicaId("sound", 0)
LIMIT_S = 10.0


class Loop:
    """The part of an event loop that sets timers, with a clock that the test turns."""

    def __init__(self) -> None:
        self.now = 0.0
        self._timers: list[tuple[float, Callable[..., None], tuple[Any, ...]]] = []

    def call_later(self, delay: float, callback: Callable[..., None], *args: Any) -> Any:
        timer = (self.now + delay, callback, args)
        self._timers.append(timer)

        class Handle:
            def cancel(_) -> None:
                self._timers.remove(timer)

        return Handle()

    def turn(self, seconds: float) -> None:
        self.now += seconds
        for timer in [timer for timer in self._timers if timer[0] <= self.now]:
            self._timers.remove(timer)
            timer[1](*timer[2])

    @property
    def timers(self) -> int:
        return len(self._timers)


class Bench:
    def __init__(self, loop: Loop, *, joinable: bool = False) -> None:
        self.loop = loop
        self.expired: list[tuple[str, str]] = []
        self.counts: list[tuple[str, int]] = []
        self.waiting = Waiting(
            LIMIT_S,
            joinable=joinable,
            expired=lambda *key: self.expired.append(key),
            changed=lambda *count: self.counts.append(count),
        )


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    loop = Loop()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: loop)
    return Bench(loop)


def test_each_wait_has_its_own_end(bench: Bench) -> None:
    bench.waiting.add("voice", "a")
    bench.loop.turn(4)
    bench.waiting.add("voice", "b")
    bench.loop.turn(5.9)
    assert (bench.expired, len(bench.waiting)) == ([], 2)
    bench.loop.turn(0.1)
    assert (bench.expired, len(bench.waiting)) == ([("voice", "a")], 1)
    bench.loop.turn(4)
    assert bench.expired == [("voice", "a"), ("voice", "b")]
    assert (len(bench.waiting), bench.loop.timers) == (0, 0)


def test_who_waits_already_gains_no_time(bench: Bench) -> None:
    bench.waiting.add("voice", "a")
    bench.loop.turn(9)
    bench.waiting.add("voice", "a")
    assert (len(bench.waiting), bench.loop.timers) == (1, 1)
    bench.loop.turn(1)
    assert bench.expired == [("voice", "a")]


def test_those_of_one_stage_are_taken_in_their_order_and_once(bench: Bench) -> None:
    for stage, request in (("voice", "b"), ("sound", "b"), ("voice", "a"), ("voice", "c")):
        bench.waiting.add(stage, request)
    assert bench.waiting.take("voice") == ["b", "a", "c"]
    assert bench.waiting.take("voice") == []
    assert len(bench.waiting) == bench.loop.timers == 1
    bench.loop.turn(LIMIT_S)
    assert bench.expired == [("sound", "b")]


def test_a_wait_that_begins_anew_has_the_whole_time(bench: Bench) -> None:
    bench.waiting.add("voice", "a")
    bench.loop.turn(9)
    bench.waiting.take("voice")
    bench.waiting.add("voice", "a")
    bench.loop.turn(9)
    assert bench.expired == []


def test_a_request_may_stop_waiting_for_some_stages(bench: Bench) -> None:
    for stage in ("text", "voice", "sound"):
        bench.waiting.add(stage, "a")
    bench.waiting.add("voice", "b")
    bench.waiting.forget("a", "voice", "nowhere")
    assert len(bench.waiting) == bench.loop.timers == 3
    bench.waiting.forget("a", "text", "sound")
    bench.waiting.forget("unknown", "voice")
    assert bench.waiting.take("voice") == ["b"]
    bench.loop.turn(LIMIT_S)
    assert (bench.expired, bench.loop.timers) == ([], 0)


def test_how_many_wait_is_told_when_it_changes(bench: Bench) -> None:
    waiting = bench.waiting
    for stage, request in (("voice", "a"), ("voice", "a"), ("voice", "b"), ("sound", "a"), ("voice", "c")):
        waiting.add(stage, request)
    assert bench.counts == [("voice", 1), ("voice", 2), ("sound", 1), ("voice", 3)]
    waiting.forget("a", "voice", "text")
    waiting.take("voice")
    waiting.take("voice")
    bench.loop.turn(LIMIT_S)
    assert bench.counts[4:] == [("voice", 2), ("voice", 0), ("sound", 0)]


def test_hope_is_for_a_stage_whose_replica_was_announced(bench: Bench) -> None:
    waiting = bench.waiting
    assert not waiting.hopeful("voice")
    waiting.announce(VOICE)
    waiting.announce(OTHER_VOICE)
    assert waiting.hopeful("voice") and not waiting.hopeful("sound")
    waiting.settle(VOICE)
    waiting.settle(SOUND)
    assert waiting.hopeful("voice")
    waiting.settle(OTHER_VOICE)
    assert not waiting.hopeful("voice")


def test_where_anybody_may_join_there_is_always_hope(bench: Bench) -> None:
    waiting = Bench(bench.loop, joinable=True).waiting
    waiting.settle(VOICE)
    assert waiting.hopeful("voice") and waiting.hopeful("sound")
