"""When a fed request may run."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_ext.engine.gate import Gate
from vllm_omni_ext.wire.handoff import chunk_of

chunks = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), max_size=8)


def test_a_request_without_a_payload_runs_at_once_and_for_ever() -> None:
    gate = Gate.of(chunk_of(None)[0])
    assert gate.ready
    assert not any(gate.starved(sampled) for sampled in range(100))


@pytest.mark.parametrize(
    ("prompt", "ready", "fed"),
    [
        ({}, True, 0),
        ({"track": [1, 2, 3]}, True, 3),
        ({"track": [1], "last": False, "rows": 0}, True, 1),
        ({"track": [], "rows": 5}, False, 0),
    ],
    ids=str,
)
def test_an_open_prompt_feeds_as_many_steps_as_it_has_entries(prompt: dict[str, Any], ready: bool, fed: int) -> None:
    gate = Gate.of(prompt)
    assert gate.ready is ready
    assert [gate.starved(sampled) for sampled in range(fed + 3)] == [False] * (fed + 1) + [True] * 2


@given(st.integers(0, 10), st.integers(0, 10), chunks)
def test_a_gate_counts_whatever_the_chunks_are(start: int, rows: int, parts: list[tuple[int, int]]) -> None:
    """Entries and rows add up; a request waits for all rows, and a step for its own entry only."""
    gate = Gate.of({"track": [0] * start, "rows": rows})
    track, left = start, rows
    for entries, more in parts:
        left -= more
        gate.take({"track": [0] * entries, "given": {"count": rows - left}})
        track += entries
        assert gate.ready == (left <= 0)
        assert not gate.starved(track)
        assert gate.starved(track + 1)


@given(st.integers(0, 5), st.lists(st.booleans(), min_size=1, max_size=6))
def test_once_closed_it_stays_closed(start: int, ends: list[bool]) -> None:
    gate = Gate.of({"track": [0] * start})
    for last in ends:
        gate.take({"last": last})
    assert gate.closed == any(ends)
    assert gate.starved(start + 1) != any(ends)


def test_rows_do_not_feed_steps_and_the_end_does_not_replace_rows() -> None:
    gate = Gate.of({"rows": 2, "last": True})
    assert not gate.ready
    gate.take({"given": {"count": 1}})
    assert not gate.ready
    gate.take({"track": []})
    assert not gate.ready
    gate.take({"given": {"count": 2}})
    assert gate.ready
    assert gate.track == 0


def test_a_prompt_may_come_with_its_rows_and_they_do_not_become_fewer() -> None:
    assert Gate.of({"rows": 2, "given": {"count": 2}}).ready
    gate = Gate.of({"rows": 3, "given": {"count": 2}})
    gate.take({"given": {"count": 1}})
    assert (gate.rows, gate.ready) == (2, False)


@given(st.integers(0, 6), st.integers(0, 6), st.integers(0, 4))
def test_a_request_that_comes_with_frames_waits_for_the_track_they_have_used(done: int, track: int, more: int) -> None:
    gate = Gate.of({"track": [0] * track, "frames": [[0]] * done})
    undisturbed = Gate.of({"track": [0] * track})
    assert gate.ready == (not undisturbed.starved(done))
    assert gate.starved(more) == undisturbed.starved(done + more)
