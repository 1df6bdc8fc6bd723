"""The pause before a replica is restarted, and the limit of restarts."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.runtime.supervise.process_watcher import LONGEST_PAUSE_S, RestartPolicy, RestartTotals

WINDOW_S = 10.0


def made(limit: int = 3, backoff_s: float = 1.0) -> RestartPolicy:
    return RestartPolicy(limit=limit, window_s=WINDOW_S, backoff_s=backoff_s)


def oracle(limit: int, times: list[float]) -> list[float | None]:
    """The same rule from the whole history: only restarts count, and only those in the window."""
    granted: list[float] = []
    answers: list[float | None] = []
    for at in times:
        recent = sum(at - before < WINDOW_S for before in granted)
        answers.append(None if recent >= limit else min(LONGEST_PAUSE_S, 2.0**recent))
        if recent < limit:
            granted.append(at)
    return answers


@pytest.mark.parametrize("limit", range(4))
def test_short_sequences_of_failures_follow_the_rule(limit: int) -> None:
    """All sequences of seven failures with pauses within, at and beyond the window."""
    for gaps in product((0.0, 4.0, WINDOW_S), repeat=6):
        times = [0.0]
        for gap in gaps:
            times.append(times[-1] + gap)
        restarts = made(limit)
        assert [restarts.failed(at) for at in times] == oracle(limit, times)


@given(
    limit=st.integers(0, 8),
    backoff_s=st.floats(0.01, 100),
    gaps=st.lists(st.floats(0, 2 * WINDOW_S, allow_nan=False), max_size=60),
)
def test_no_window_has_more_restarts_than_the_limit(limit: int, backoff_s: float, gaps: list[float]) -> None:
    restarts, at = made(limit, backoff_s), 0.0
    granted: list[float] = []
    for gap in gaps:
        at += gap
        pause = restarts.failed(at)
        assert pause is None or min(backoff_s, LONGEST_PAUSE_S) <= pause <= LONGEST_PAUSE_S
        if pause is not None:
            granted.append(at)
    assert restarts.count == len(granted)
    if limit:
        assert all(b - a >= WINDOW_S * 0.999 for a, b in zip(granted, granted[limit:], strict=False))


def test_totals_of_a_name_go_on_when_another_host_has_it() -> None:
    totals, one, other = RestartTotals(), ReplicaId("talker", 0), ReplicaId("talker", 1)
    assert [totals.add(one, reported) for reported in (0, 1, 3, 3)] == [0, 1, 3, 3]
    assert [totals.add(one, reported) for reported in (0, 1)] == [3, 4], "a replica of another host begins at 0"
    assert totals.add(other, 2) == 2
    assert totals.by_name == {one: 4, other: 2}
