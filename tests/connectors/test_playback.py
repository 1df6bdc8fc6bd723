"""The times at which parts of a sound are due, for any parts at any times."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_ext.connectors.playback import Playback

RATE = 12.5


def test_a_part_is_due_when_the_parts_before_it_have_been_played() -> None:
    playback = Playback(RATE)
    assert playback.due(0, 7.0) == 7.0
    assert playback.due(1, 7.1) == pytest.approx(7.08), "as if the first part had been played at once"
    playback.delivered(0.057, 1, 7.2)
    assert playback.due(1, 7.2) == pytest.approx(7.257)
    assert playback.due(3, 7.2) == pytest.approx(7.257 + 2 / RATE), "parts that are on their way count too"


def test_a_stream_that_begins_again_is_due_at_the_end_of_its_sound() -> None:
    playback = Playback(RATE)
    playback.due(0, 0.0)
    playback.delivered(0.08, 1, 0.1)
    assert playback.due(26, 0.1) == pytest.approx(0.18 + 2.0)
    assert playback.again() == pytest.approx(0.18)
    assert playback.due(1, 0.2) == pytest.approx(0.18)


@given(st.lists(st.tuples(st.floats(0.0, 0.5), st.integers(1, 25), st.booleans()), max_size=60))
def test_parts_of_a_stream_are_due_in_their_order(steps: list[tuple[float, int, bool]]) -> None:
    playback, now, sent, heard = Playback(RATE), 0.0, 0, 0
    last = 0.0
    for gap, items, answered in steps:
        now += gap
        due = playback.due(sent, now)
        assert due >= last
        last, sent = due, sent + items
        if answered:
            playback.delivered((sent - heard) / RATE, sent, now)
            heard = sent
    again = playback.again()
    assert playback.due(sent, now) >= again


@given(st.lists(st.tuples(st.floats(0.0, 1.0), st.integers(1, 25)), min_size=1, max_size=40))
def test_the_next_part_is_due_when_a_listener_in_real_time_has_played_all(pieces: list[tuple[float, int]]) -> None:
    playback, now, items, played_to = Playback(RATE), 0.0, 0, None
    playback.due(0, now)
    for gap, count in pieces:
        now += gap
        items += count
        playback.delivered(count / RATE, items, now)
        played_to = max(now, now if played_to is None else played_to) + count / RATE
        assert playback.due(items, now) == pytest.approx(played_to)
