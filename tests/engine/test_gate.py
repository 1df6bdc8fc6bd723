"""How far a fed request may run."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_ext.engine.gate import Gate
from vllm_omni_ext.wire.handoff import chunk_of

SIZE = 12
chunks = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(0, 5)), max_size=8)
spans = st.lists(st.integers(0, SIZE), unique=True, max_size=6).map(
    lambda cuts: list(zip(sorted(cuts)[::2], sorted(cuts)[1::2], strict=False))
)


def test_a_request_without_a_payload_runs_at_once_and_for_ever() -> None:
    assert Gate.of(chunk_of(None)[0], SIZE).limit() is None


@pytest.mark.parametrize(
    ("prompt", "limit"),
    [
        ({}, SIZE),
        ({"last": True}, None),
        ({"track": [1, 2, 3]}, SIZE + 3),
        ({"track": [1], "last": False, "rows": []}, SIZE + 1),
        ({"track": [1], "last": True, "rows": [[0, 5]]}, 0),
        ({"track": [], "rows": [[3, 5]]}, 3),
        ({"text": [7] * SIZE, "rows": [[3, 5]]}, 3),
        ({"text": [7] * (SIZE - 1)}, SIZE - 1),
        ({"text": [7] * (SIZE - 1), "last": True}, SIZE - 1),
        ({"text": [7] * 2, "rows": [[3, 5]]}, 2),
        ({"text": [7] * SIZE, "track": [1]}, SIZE + 1),
    ],
    ids=str,
)
def test_how_far_what_is_known_reaches(prompt: dict[str, Any], limit: int | None) -> None:
    assert Gate.of(prompt, SIZE).limit() == limit


@given(st.integers(0, SIZE), st.integers(0, 10), spans, chunks)
def test_a_gate_counts_whatever_the_chunks_are(
    text: int, start: int, due: list[tuple[int, int]], parts: list[tuple[int, int, int]]
) -> None:
    """A position can be computed if its id is known, its row has come if it has one, and all before it can."""
    gate = Gate.of({"text": [0] * text, "track": [0] * start, "rows": [list(span) for span in due]}, SIZE)
    at = [p for a, b in due for p in range(a, b)]
    track, rows = start, 0
    for entries, more, ids in [(0, 0, 0), *parts]:
        ids = min(ids, SIZE - text)
        gate.take({"text": [0] * ids, "track": [0] * entries, "given": {"count": rows + more}})
        track, rows, text = track + entries, rows + more, text + ids
        known = [p < text and p not in at[rows:] for p in range(SIZE)]
        assert gate.limit() == (SIZE + track if all(known) else known.index(False))


@given(st.integers(0, 5), st.lists(st.booleans(), min_size=1, max_size=6))
def test_once_closed_it_stays_closed(start: int, ends: list[bool]) -> None:
    gate = Gate.of({"track": [0] * start}, SIZE)
    for last in ends:
        gate.take({"last": last})
    assert (gate.limit() is None) == any(ends)


def test_rows_do_not_feed_steps_and_the_end_does_not_replace_rows() -> None:
    gate = Gate.of({"rows": [[1, 2], [4, 5]], "last": True}, SIZE)
    assert gate.limit() == 1
    gate.take({"given": {"count": 1}})
    assert gate.limit() == 4
    gate.take({"given": {"count": 2}})
    assert gate.limit() is None
    assert gate.track == 0


@given(st.integers(1, 6), st.integers(0, 6))
def test_tokens_sampled_elsewhere_have_used_the_track_too(done: int, track: int) -> None:
    there = Gate.of({"track": [0] * track, "frames": [[0]] * done}, SIZE + done)
    assert there.limit() == Gate.of({"track": [0] * track}, SIZE).limit() == SIZE + track


def test_rows_do_not_become_fewer() -> None:
    """Another replica that makes them anew has to get as far first."""
    gate = Gate.of({"text": [0] * 4, "rows": [[0, 3]], "given": {"count": 2}}, 4)
    gate.take({"given": {"count": 1}})
    assert gate.limit() == 2
