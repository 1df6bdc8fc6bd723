"""Times and figures of load, with clocks that the test sets."""

from __future__ import annotations

import asyncio
import io
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from vllm_omni_ext.loadtest.answers import BROKEN, SOUNDLESS, TIMEOUT, Answer, Failure, Timeline
from vllm_omni_ext.loadtest.figures import MEASURES, distribution, figures, most_at_once
from vllm_omni_ext.loadtest.report import ROWS, as_json, table
from vllm_omni_ext.loadtest.schedule import arrivals, closed_loop, open_loop


class Clock:
    """A clock that the test sets."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def answer(due: float, ended: float, **more: Any) -> Answer:
    whole = {"began_at": due, "whole_s": ended - due, "first_sound_s": (ended - due) / 2, "sound_s": 2.0}
    return Answer(**{"due_at": due, "ended_at": ended, **whole, **more})


def test_times_count_from_the_scheduled_beginning() -> None:
    clock = Clock(10.5)
    timeline = Timeline(clock, due_at=10.0)
    clock.now = 11.0
    timeline.text()
    clock.now = 11.5
    timeline.sound(0.0)
    timeline.sound(0.25)
    clock.now = 12.0
    timeline.text()
    timeline.sound(0.75)
    clock.now = 14.0
    got = timeline.end()
    assert (got.due_at, got.began_at, got.ended_at) == (10.0, 10.5, 14.0)
    assert (got.first_text_s, got.first_sound_s, got.whole_s, got.sound_s) == (1.0, 1.5, 4.0, 1.0)
    assert got.silences == (0.25,), "from 11.75 to 12"
    assert (got.failure, got.ready_s, got.real_time_factor) == (None, None, 4.0)


def test_without_a_schedule_times_count_from_now() -> None:
    clock = Clock(3.0)
    timeline = Timeline(clock)
    clock.now = 4.0
    timeline.sound(1.0)
    assert timeline.end().first_sound_s == 1.0


def test_times_of_a_spoken_turn_count_from_its_end() -> None:
    clock = Clock(0.0)
    timeline = Timeline(clock, due_at=0.0)
    clock.now = 0.5
    timeline.ready()
    clock.now = 3.0
    timeline.spoken()
    clock.now = 3.25
    timeline.sound(1.0)
    got = timeline.end()
    assert (got.ready_s, got.first_sound_s, got.whole_s) == (0.5, 0.25, 0.25)
    timeline.spoken(2.5)
    assert timeline.end().first_sound_s == 0.75


def test_what_follows_a_complete_answer_does_not_count() -> None:
    clock = Clock(0.0)
    timeline = Timeline(clock)
    clock.now = 1.0
    timeline.sound(1.0)
    timeline.done()
    clock.now = 9.0
    got = timeline.end(Failure(TIMEOUT, "the connection is still open"))
    assert (got.ended_at, got.whole_s, got.failure, got.detail) == (1.0, 1.0, None, "")


def test_an_answer_without_sound_is_a_failure() -> None:
    timeline = Timeline(Clock())
    timeline.text()
    assert timeline.end().failure == SOUNDLESS
    failed = timeline.end(Failure(BROKEN, "gone"))
    assert (failed.failure, failed.detail, failed.first_text_s, failed.first_sound_s) == (BROKEN, "gone", 0.0, None)


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 400)), min_size=1, max_size=30))
def test_silences_are_those_of_a_listener_simulated_in_steps_of_1_ms(pieces: list[tuple[int, int]]) -> None:
    clock, timeline, queued, silences, begun = Clock(), Timeline(Clock()), 0, [0], False
    timeline = Timeline(clock)
    for gap, ms in pieces:
        for _ in range(gap):
            silences[-1] += begun and not queued
            queued = max(0, queued - 1)
        clock.now += gap / 1000
        timeline.sound(ms / 1000)
        if ms:
            begun, queued = True, queued + ms
            silences.append(0)
    *heard, _after_the_last = silences  # what follows the last piece is no gap
    assert [1e3 * each for each in timeline.end().silences if each > 1e-6] == pytest.approx([s for s in heard if s])


@pytest.mark.parametrize("requests", [1, 7])
def test_arrivals_are_those_of_the_seed(requests: int) -> None:
    times = arrivals(requests, 4.0, seed=1)
    assert times == sorted(times) == arrivals(requests, 4.0, seed=1) != arrivals(requests, 4.0, seed=2)
    assert times == pytest.approx([each / 2 for each in arrivals(requests, 2.0, seed=1)])


def test_arrivals_are_a_poisson_process() -> None:
    times = np.array(arrivals(20_000, 50.0, seed=0))
    gaps = np.diff(times)
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.03)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.03)
    counts = np.bincount(times.astype(int))[:-1]
    assert counts.var() == pytest.approx(counts.mean(), rel=0.2)


@pytest.mark.parametrize(("requests", "concurrency"), [(1, 4), (4, 4), (10, 3), (0, 2)])
async def test_a_closed_loop_has_so_many_requests_at_a_time(requests: int, concurrency: int) -> None:
    running, most, numbers = 0, 0, []

    async def one(number: int, due_at: float | None) -> Answer:
        nonlocal running, most
        assert due_at is None
        numbers.append(number)
        running += 1
        most = max(most, running)
        for _ in range(number % 3 + 1):
            await asyncio.sleep(0)
        running -= 1
        return answer(0, 1)

    assert len(await closed_loop(requests, concurrency, one)) == requests
    assert sorted(numbers) == list(range(requests))
    assert most == min(requests, concurrency)


async def test_an_open_loop_begins_at_its_times_although_nothing_is_answered() -> None:
    times, began, clock = [0.01, 0.02, 0.03], [], asyncio.get_running_loop().time
    all_begun, start = asyncio.Event(), clock()

    async def one(number: int, due_at: float | None) -> Answer:
        began.append((number, due_at))
        if len(began) == len(times):
            all_begun.set()
        await all_begun.wait()
        return answer(due_at, clock())

    answers = await open_loop(times, one, clock)
    assert [number for number, _ in began] == [0, 1, 2]
    assert np.diff([due for _, due in began]) == pytest.approx(np.diff(times))
    assert [each.due_at for each in answers] == [due for _, due in began]
    assert began[0][1] - start >= 0.01


async def test_a_client_that_is_late_still_counts_from_the_schedule() -> None:
    clock, seen = Clock(), []

    async def one(number: int, due_at: float | None) -> Answer:
        timeline = Timeline(clock, due_at)
        clock.now += 5.0  # the loop is held up by something else
        timeline.sound(1.0)
        seen.append(timeline.end())
        return seen[-1]

    await open_loop([0.0, 0.0, 0.0], one, clock)
    assert [each.first_sound_s for each in seen] == [5.0, 10.0, 15.0]
    assert figures(seen).client_was_late


def test_a_distribution_has_the_percentiles_of_numpy() -> None:
    got = distribution(range(101))
    assert got is not None
    assert (got.count, got.mean, got.least, got.p50, got.p90, got.p95, got.p99, got.most) == (
        101, 50.0, 0.0, 50.0, 90.0, 95.0, 99.0, 100.0,
    )  # fmt: skip
    one = distribution([3.0])
    assert one is not None
    assert {one.mean, one.least, one.p50, one.p99, one.most} == {3.0}
    assert distribution([]) is None


def test_figures_are_of_whole_answers_over_the_time_of_all() -> None:
    answers = [
        answer(0.0, 4.0, silences=(0.5, 0.01), first_text_s=0.25),
        answer(1.0, 3.0, silences=(0.02,)),
        answer(2.0, 10.0, failure=TIMEOUT, sound_s=99.0, silences=(9.0,)),
        answer(2.0, 2.5, failure=TIMEOUT),
        answer(2.0, 2.5, failure="status 503"),
    ]
    got = figures(answers)
    assert (got.requests, got.answered, got.duration_s, got.most_at_once) == (5, 2, 10.0, 5)
    assert got.failures == {TIMEOUT: 2, "status 503": 1}
    assert (got.answers_per_s, got.sound_s_per_s) == (0.2, 0.4)
    assert (got.gaps, got.answers_with_gaps) == (1, 1)
    assert got.measures["whole_s"].most == 4.0
    assert got.measures["real_time_factor"].mean == 1.5
    assert got.measures["silence_s"].most == pytest.approx(0.51)
    assert got.measures["longest_gap_s"].most == 0.5
    assert got.measures["first_text_s"].count == 1
    assert "session_ready_s" not in got.measures
    assert not got.client_was_late


def test_figures_without_a_whole_answer_have_failures_only() -> None:
    got = figures([answer(1.0, 1.0, failure=BROKEN)])
    assert (got.answered, got.duration_s, got.answers_per_s, got.measures) == (0, 0.0, 0.0, {})
    with pytest.raises(ValueError, match="without requests"):
        figures([])


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 10)), max_size=20))
def test_most_at_once_is_that_of_all_moments(spans: list[tuple[int, int]]) -> None:
    answers = [answer(float(begin), float(begin + length)) for begin, length in spans]
    expected = max((sum(b <= at < b + n for b, n in spans) for at in range(31)), default=0)
    assert most_at_once(answers) == expected


def test_the_table_and_the_json_have_all_measures() -> None:
    answers = [answer(0.0, 4.0, began_at=0.5, ready_s=0.2, first_text_s=0.1), answer(0.0, 4.0, failure=BROKEN)]
    found = figures(answers)
    printed = io.StringIO()
    Console(file=printed, width=120).print(table(found, "chat"))
    assert ROWS.keys() == MEASURES.keys() == found.measures.keys()
    for words in (*(name for name, _ in ROWS.values()), "answered: 1 of 2", f"failed: 1 ({BROKEN})", "ms late"):
        assert words in printed.getvalue()
    document = json.loads(as_json({"api": "chat"}, found, answers))
    assert document["settings"] == {"api": "chat"}
    assert document["figures"]["measures"]["first_sound_s"]["p50"] == 2.0
    assert [each["failure"] for each in document["answers"]] == [None, BROKEN]
    Console(file=printed, width=120).print(table(figures(answers[1:]), "chat"))
