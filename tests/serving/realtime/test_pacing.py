"""Pacing of sound for a listener that plays in real time."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_ext.modalities.chunks import AudioChunk
from vllm_omni_ext.serving.realtime.answering import PIECE_MS, _Player
from vllm_omni_ext.serving.realtime.pacing import Pacer

SENDS = st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 2000)), min_size=1, max_size=40)
"""Milliseconds before a piece, and of the piece."""


def test_at_most_300_ms_are_unplayed() -> None:
    pacer = Pacer()
    assert (pacer.due(100, 5.0), pacer.played_ms(5.0), pacer.remaining_ms(5.0)) == (0.0, 0.0, 0.0)
    pacer.sent(200, 5.0)
    assert pacer.due(100, 5.0) == pytest.approx(0)
    pacer.sent(100, 5.0)
    assert pacer.due(100, 5.0) == pytest.approx(0.1)
    assert pacer.due(100, 5.1) == pytest.approx(0.0)
    assert pacer.due(40, 5.0) == pytest.approx(0.04)
    assert pacer.due(400, 5.0) == pytest.approx(0.3), "a longer piece when all sound has been played"
    assert pacer.played_ms(5.25) == pytest.approx(250)
    assert pacer.remaining_ms(5.25) == pytest.approx(50)


def test_an_underrun_shifts_the_rest() -> None:
    pacer = Pacer()
    pacer.sent(100, 0.0)
    assert pacer.played_ms(2.0) == pytest.approx(100)
    pacer.sent(100, 2.0)
    assert pacer.played_ms(2.05) == pytest.approx(150)


def test_a_cancelled_answer_keeps_the_played_sound_and_takes_no_more() -> None:
    pacer = Pacer()
    pacer.sent(1000, 1.0)
    assert pacer.cancel(1.25) == pytest.approx(250)
    assert pacer.played_ms(9.0) == pacer.cancel(9.0) == pytest.approx(250)
    assert pacer.remaining_ms(1.3) == 0.0
    for call in (lambda: pacer.due(100, 2.0), lambda: pacer.sent(1, 2.0)):
        with pytest.raises(ValueError, match="cancelled"):
            call()
    assert Pacer().cancel(0.0) == 0.0


@pytest.mark.parametrize("pieces", [[100.0] * 10, [100.0, 100.0, 100.0, 20.0] * 50, [0.125, 33.3] * 20])
def test_sound_that_was_played_to_its_end_has_exactly_the_length_that_was_sent(pieces: list[float]) -> None:
    pacer, sent, now = Pacer(), 0.0, 10.0
    for ms in pieces:
        pacer.sent(ms, now)
        sent += ms
        now += ms / 1000
    assert pacer.played_ms(now + 60) == sent


@pytest.mark.parametrize("waiting", [False, True])
async def test_a_cancelled_answer_has_no_further_piece(waiting: bool) -> None:
    pacer = Pacer()
    player = _Player(pacer, {"type": "audio/pcm"}, lambda: 0.0)
    player.add(AudioChunk(samples=np.zeros(24_000, np.float32), sample_rate=24_000, last=True))
    for _ in range(3):
        assert await player.next() == (bytes(48 * PIECE_MS), PIECE_MS)
    if waiting:
        fourth = asyncio.create_task(player.next())
        await asyncio.sleep(0)
        pacer.cancel(0.0)
        assert await fourth is None
    else:
        pacer.cancel(0.0)
    assert await player.next() is None


@pytest.mark.parametrize("call", [lambda: Pacer(-1), lambda: Pacer().sent(-1, 0.0)])
def test_negative_times_are_refused(call) -> None:
    with pytest.raises(ValueError, match="must not be negative, got -1"):
        call()


@given(SENDS)
def test_played_sound_is_that_of_a_listener_simulated_in_steps_of_1_ms(sends: list[tuple[int, int]]) -> None:
    pacer, now, queued, played = Pacer(), 0, 0, 0
    for gap, ms in sends:
        for _ in range(gap):
            step = min(1, queued)
            queued, played, now = queued - step, played + step, now + 1
        assert pacer.played_ms(now / 1000) == pytest.approx(played, abs=1e-6)
        assert pacer.remaining_ms(now / 1000) == pytest.approx(queued, abs=1e-6)
        pacer.sent(ms, now / 1000)
        queued += ms


@given(st.lists(st.integers(1, 500), min_size=1, max_size=60), st.integers(0, 1000))
def test_a_sender_that_waits_until_a_piece_is_due_causes_no_underrun(pieces: list[int], ahead: int) -> None:
    pacer, now = Pacer(ahead), 0.0
    for at, ms in enumerate(pieces):
        now += pacer.due(ms, now)
        assert pacer.remaining_ms(now) + ms <= max(ahead, ms) + 1e-6, "never earlier than allowed"
        assert pacer.played_ms(now) == pytest.approx(1000 * now, abs=1e-6) or at == 0, "never a pause"
        pacer.sent(ms, now)
    assert pacer.played_ms(now + sum(pieces)) == pytest.approx(sum(pieces))


@given(SENDS, st.lists(st.integers(0, 1000), min_size=2, max_size=10))
def test_played_sound_never_shrinks_nor_exceeds_the_sent_sound(sends: list[tuple[int, int]], looks: list[int]) -> None:
    pacer, now, sent, before = Pacer(), 0.0, 0, 0.0
    for (gap, ms), look in zip(sends, looks, strict=False):
        now += gap / 1000
        pacer.sent(ms, now)
        sent += ms
        now += look / 1000
        played = pacer.played_ms(now)
        assert before - 1e-6 <= played <= sent + 1e-6
        before = played
