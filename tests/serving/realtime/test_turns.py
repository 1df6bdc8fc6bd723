"""Turns of a speaker, from the probabilities of speech in frames."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_ext.serving.realtime.turns import (
    LEAST_SPEECH_MS,
    LONGEST_PAUSE_MS,
    PAUSE_MS,
    Event,
    IdleTimeout,
    SemanticVad,
    ServerVad,
    SpeechStarted,
    SpeechStopped,
    TurnDetector,
)

FRAME = 32.0


def frames(*runs: tuple[float, float], begin: float = 0.0, frame: float = FRAME) -> list[tuple[float, float]]:
    """Frames of runs of (ms, probability)."""
    made, now = [], begin
    for ms, probability in runs:
        for _ in range(round(ms / frame)):
            now += frame
            made.append((now, probability))
    return made


def turns(settings: ServerVad | SemanticVad, *runs: tuple[float, float], **arguments: Any) -> list[Event]:
    return TurnDetector(settings, **arguments).write(frames(*runs))


def test_a_turn_has_the_padding_before_and_the_silence_after_its_speech() -> None:
    assert turns(ServerVad(), (960, 0), (640, 1), (960, 0)) == [SpeechStarted(660), SpeechStopped(2100)]


def test_the_events_come_with_the_frame_that_decides() -> None:
    detector = TurnDetector(ServerVad(silence_duration_ms=100))
    events = [detector.write([frame]) for frame in frames((320, 0), (320, 1), (320, 0))]
    (started,), (stopped,) = ([at for at, found in enumerate(events) if kind in map(type, found)] for kind in KINDS)
    assert started == 11, "the second frame of speech: 64 ms"
    assert stopped == 23, "the fourth frame of silence: 128 ms"
    assert not detector.speaking


KINDS = (SpeechStarted, SpeechStopped)


def test_the_events_come_with_the_same_frames_at_any_position_of_the_sound() -> None:
    for sample in range(2400, 4800):  # at 24 kHz
        detector, begin = TurnDetector(ServerVad(silence_duration_ms=10 * FRAME)), sample / 24
        detector.drop(begin)
        ends = [(begin + FRAME * at, float(at <= 4)) for at in range(1, 16)]
        found = [at for at, each in enumerate(ends, 1) if detector.write([each])]
        assert found == [2, 14], begin


@pytest.mark.parametrize(
    ("settings", "begin"),
    [({"prefix_padding_ms": 0}, 960.0), ({"prefix_padding_ms": 100}, 860.0), ({"prefix_padding_ms": 5000}, 0.0)],
)
def test_leading_silence_is_no_part_of_the_turn(settings: dict[str, float], begin: float) -> None:
    assert turns(ServerVad(**settings), (960, 0), (320, 1)) == [SpeechStarted(begin)]


def test_the_padding_of_a_turn_does_not_reach_into_the_one_before() -> None:
    runs = ((320, 1), (192, 0), (320, 1), (320, 0))
    got = turns(ServerVad(silence_duration_ms=160, prefix_padding_ms=300), *runs)
    assert got == [SpeechStarted(0), SpeechStopped(480), SpeechStarted(480), SpeechStopped(992)]


def test_a_pause_that_is_shorter_than_the_silence_is_inside_the_turn() -> None:
    assert turns(ServerVad(), (320, 1), (480, 0), (320, 1), (512, 0)) == [SpeechStarted(0), SpeechStopped(1620)]


def test_a_click_is_no_turn() -> None:
    assert turns(ServerVad(), (320, 0), (FRAME, 1), (640, 0), (FRAME, 1), (640, 0)) == []
    assert LEAST_SPEECH_MS == 2 * FRAME


def test_a_probability_between_the_two_limits_neither_begins_nor_ends_speech() -> None:
    assert turns(ServerVad(), (3200, 0.4)) == []
    assert turns(ServerVad(), (320, 0.6), (3200, 0.4)) == [SpeechStarted(0)]
    assert turns(ServerVad(), (FRAME, 0.6), (320, 0.4)) == [SpeechStarted(0)], "also while speech is short"
    got = turns(ServerVad(), (320, 0.6), (320, 0.3), (320, 0.4))
    assert got == [SpeechStarted(0), SpeechStopped(820)], "silence that has begun goes on"


@pytest.mark.parametrize("threshold", [0.0, 0.005, 0.1, 0.9, 1.0])
def test_speech_is_at_or_above_the_threshold(threshold: float) -> None:
    assert turns(ServerVad(threshold=threshold), (320, threshold)) == [SpeechStarted(0)]
    if threshold:
        below = threshold - 1e-6
        assert turns(ServerVad(threshold=threshold), (320, below)) == []
        got = turns(ServerVad(threshold=threshold), (320, threshold), (640, 0.0))
        assert got == [SpeechStarted(0), SpeechStopped(820)]


def idle(at: float | None, *runs: tuple[float, float]) -> list[Event]:
    detector = TurnDetector(ServerVad(idle_timeout_ms=5000))
    detector.idle_from(at)
    return detector.write(frames(*runs))


def test_a_timeout_follows_the_end_of_an_answer_once() -> None:
    assert idle(1000, (12000, 0)) == [IdleTimeout(1000, 6000)]
    assert idle(None, (12000, 0)) == []
    assert turns(ServerVad(), (12000, 0)) == []


def test_speech_before_the_timeout_cancels_it() -> None:
    got = idle(1000, (4960, 0), (320, 1), (12000, 0))
    assert got == [SpeechStarted(4660), SpeechStopped(5780)]


def test_speech_that_is_too_short_delays_the_timeout_only() -> None:
    begin = 5952.0  # a multiple of a frame; the timeout falls into the click
    assert idle(1000 - 32, (begin, 0), (FRAME, 1), (640, 0)) == [IdleTimeout(968, begin + FRAME)]


def test_the_end_of_an_answer_while_the_user_speaks_is_no_beginning_of_silence() -> None:
    detector = TurnDetector(ServerVad(idle_timeout_ms=100))
    detector.write(frames((320, 1)))
    detector.idle_from(320)
    assert detector.write(frames((6400, 0), begin=320)) == [SpeechStopped(820)]


def test_the_sound_of_a_timeout_is_no_part_of_the_next_turn() -> None:
    detector = TurnDetector(ServerVad(idle_timeout_ms=960))
    detector.idle_from(0)
    assert detector.write(frames((960, 0), (320, 1))) == [IdleTimeout(0, 960), SpeechStarted(960)]


def test_a_turn_that_the_client_committed_ends_without_event() -> None:
    detector = TurnDetector(ServerVad())
    assert detector.write(frames((320, 1))) == [SpeechStarted(0)]
    detector.drop(400)
    assert not detector.speaking
    assert detector.write(frames((64, 1), begin=320)) == [], "before the end of the committed sound"
    assert detector.write(frames((128, 1), begin=384)) == [SpeechStarted(400)]


def test_sound_is_needed_from_the_padding_before_a_turn_that_may_begin_now() -> None:
    detector = TurnDetector(ServerVad(idle_timeout_ms=5000))
    assert detector.needed_from_ms == 0
    detector.write(frames((1600, 0)))
    assert detector.needed_from_ms == 1300
    detector.write([(1632, 1)])
    assert detector.needed_from_ms == 1300, "of the speech that may have begun"
    detector.write(frames((320, 1), begin=1632))
    detector.write(frames((480, 0), begin=1952))
    assert detector.needed_from_ms == 1300, "of the turn"
    detector.write(frames((32, 0), begin=2432))
    assert detector.needed_from_ms == 2452, "nothing of the turn before"
    detector.idle_from(3000)
    detector.write(frames((3200, 0), begin=2464))
    assert detector.needed_from_ms == 3000, "of the sound of a timeout"
    detector.drop(5664)
    assert detector.needed_from_ms == 5664


def test_without_a_timeout_no_sound_is_kept_for_it() -> None:
    detector = TurnDetector(ServerVad())
    detector.idle_from(0)
    detector.write(frames((6400, 0)))
    assert detector.needed_from_ms == 6100


def test_a_detector_with_other_settings_goes_on_where_the_one_before_ended() -> None:
    detector = TurnDetector(ServerVad(), begin_ms=6400)
    assert detector.needed_from_ms == 6400
    assert detector.write(frames((64, 0), (320, 1), begin=6400)) == [SpeechStarted(6400)]


@pytest.mark.parametrize("settings", [ServerVad(silence_duration_ms=900), SemanticVad()])
def test_a_turn_goes_on_with_other_settings(settings: Any) -> None:
    detector = TurnDetector(ServerVad())
    assert detector.write(frames((320, 1), (320, 0))) == [SpeechStarted(0)]
    detector.use(settings, lambda start, end: 1.0, from_ms=0)
    silence = PAUSE_MS if isinstance(settings, SemanticVad) else 900
    assert detector.write(frames((640, 0), begin=640)) == [SpeechStopped(320 + silence)]


def test_other_settings_keep_the_wait_for_silence_if_they_have_one() -> None:
    detector = TurnDetector(ServerVad(idle_timeout_ms=5000))
    detector.idle_from(1000)
    detector.use(ServerVad(idle_timeout_ms=1000), from_ms=0)
    assert detector.write(frames((3200, 0))) == [IdleTimeout(1000, 2000)]
    detector.idle_from(3200)
    detector.use(ServerVad(), from_ms=0)
    detector.use(ServerVad(idle_timeout_ms=1000), from_ms=0)
    assert detector.write(frames((3200, 0), begin=3200)) == []


def test_a_turn_after_other_settings_has_only_sound_that_is_left() -> None:
    detector = TurnDetector(ServerVad(prefix_padding_ms=0))
    detector.write(frames((640, 0)))
    detector.use(ServerVad(), from_ms=500)
    assert detector.write(frames((320, 1), begin=640)) == [SpeechStarted(500)]


class Judge:
    """Completeness that was set before; records the calls."""

    def __init__(self, *answers: float) -> None:
        self.answers, self.calls = list(answers), []

    def __call__(self, begin: float, end: float) -> float:
        self.calls.append((begin, end))
        return self.answers.pop(0)


def test_a_complete_turn_ends_after_a_short_pause() -> None:
    judge = Judge(0.5)
    got = turns(SemanticVad(), (640, 0), (320, 1), (640, 0), completeness=judge)
    assert got == [SpeechStarted(340), SpeechStopped(960 + PAUSE_MS)]
    assert judge.calls == [(340, 960 + PAUSE_MS)]


@pytest.mark.parametrize("eagerness", LONGEST_PAUSE_MS)
def test_an_incomplete_turn_ends_after_the_longest_pause_of_its_eagerness(eagerness: str) -> None:
    judge, longest = Judge(0.49), LONGEST_PAUSE_MS[eagerness]
    settings = SemanticVad(eagerness=eagerness)
    assert turns(settings, (320, 1), (longest - FRAME, 0), completeness=Judge(0.49)) == [SpeechStarted(0)]
    got = turns(settings, (320, 1), (longest + FRAME, 0), completeness=judge)
    assert got == [SpeechStarted(0), SpeechStopped(320 + longest)]
    assert len(judge.calls) == 1


def test_each_pause_is_judged_for_the_sound_before_it() -> None:
    judge = Judge(0.1, 0.9)
    got = turns(SemanticVad(), (320, 1), (640, 0), (320, 1), (64, 0), (320, 1), (640, 0), completeness=judge)
    assert got == [SpeechStarted(0), SpeechStopped(1664 + PAUSE_MS)]
    assert judge.calls == [(0, 320 + PAUSE_MS), (0, 1664 + PAUSE_MS)]


@pytest.mark.parametrize(
    ("settings", "values", "message"),
    [
        (ServerVad, {"threshold": 1.1}, "threshold: must be from 0 to 1, got 1.1"),
        (ServerVad, {"threshold": -0.1}, "threshold"),
        (ServerVad, {"threshold": float("nan")}, "threshold"),
        (ServerVad, {"prefix_padding_ms": -1}, "prefix_padding_ms: must be 0 or more, got -1"),
        (ServerVad, {"silence_duration_ms": float("nan")}, "silence_duration_ms"),
        (ServerVad, {"idle_timeout_ms": 0}, "idle_timeout_ms: must be more than 0, got 0"),
        (SemanticVad, {"eagerness": "very"}, "eagerness: must be one of low, medium, auto, high, got 'very'"),
    ],
)
def test_wrong_settings_are_refused(settings: Any, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings(**values)


def test_semantic_detection_needs_a_judge() -> None:
    with pytest.raises(ValueError, match="completeness"):
        TurnDetector(SemanticVad())


def test_frames_go_forward() -> None:
    detector = TurnDetector(ServerVad())
    detector.write([(32.0, 0.0)])
    with pytest.raises(ValueError, match=r"a frame ends at 32\.0 ms, the one before it at 32\.0 ms"):
        detector.write([(32.0, 0.0)])


PROBABILITIES = st.lists(st.sampled_from([0.0, 0.2, 0.34, 0.36, 0.45, 0.5, 0.9, 1.0]), max_size=120)
SETTINGS = st.builds(
    ServerVad,
    threshold=st.sampled_from([0.0, 0.005, 0.4, 0.5, 1.0]),
    prefix_padding_ms=st.sampled_from([0.0, 10.0, 300.0, 10_000.0]),
    silence_duration_ms=st.sampled_from([0.0, 10.0, 200.0, 500.0]),
    idle_timeout_ms=st.sampled_from([None, 50.0, 320.0, 1000.0]),
)


def times(event: Event) -> Iterable[float]:
    return (value for value in vars(event).values())


@given(SETTINGS, PROBABILITIES, st.lists(st.integers(0, 120), max_size=6), st.one_of(st.none(), st.integers(0, 2000)))
def test_events_alternate_in_the_order_of_time_and_do_not_depend_on_pieces(
    settings: ServerVad, probabilities: list[float], cuts: list[int], idle_at: int | None
) -> None:
    all_frames = [(FRAME * (at + 1), probability) for at, probability in enumerate(probabilities)]
    whole = TurnDetector(settings)
    whole.idle_from(idle_at)
    events = whole.write(all_frames)
    kinds = [type(event) for event in events if not isinstance(event, IdleTimeout)]
    assert kinds == [KINDS[at % 2] for at in range(len(kinds))]
    assert sum(isinstance(event, IdleTimeout) for event in events) <= 1
    moments = [moment for event in events for moment in times(event)]
    assert moments == sorted(moments)
    assert all(0 <= moment <= FRAME * len(probabilities) for moment in moments if idle_at is None)
    cut = TurnDetector(settings)
    cut.idle_from(idle_at)
    edges = [0, *sorted(min(at, len(all_frames)) for at in cuts), len(all_frames)]
    assert [event for a, b in pairwise(edges) for event in cut.write(all_frames[a:b])] == events


@given(SETTINGS, PROBABILITIES, st.integers(2, 4), st.one_of(st.none(), st.integers(0, 2000)))
def test_frames_of_any_length_with_the_same_probabilities_give_the_same_events(
    settings: ServerVad, probabilities: list[float], parts: int, idle_at: int | None
) -> None:
    coarse, fine = TurnDetector(settings), TurnDetector(settings)
    coarse.idle_from(idle_at)
    fine.idle_from(idle_at)
    in_parts = [
        (FRAME * (at + (part + 1) / parts), probability)
        for at, probability in enumerate(probabilities)
        for part in range(parts)
    ]
    expected = coarse.write([(FRAME * (at + 1), probability) for at, probability in enumerate(probabilities)])
    got = fine.write(in_parts)
    assert [type(event) for event in got] == [type(event) for event in expected]
    for mine, theirs in zip(got, expected, strict=True):
        assert list(times(mine)) == pytest.approx(list(times(theirs)))


@given(SETTINGS, PROBABILITIES, st.lists(st.tuples(st.integers(0, 119), st.integers(0, 4000)), max_size=4))
def test_sound_that_a_turn_contains_was_needed_at_all_times_before(
    settings: ServerVad, probabilities: list[float], drops: list[tuple[int, int]]
) -> None:
    detector, needed, forgotten = TurnDetector(settings), 0.0, dict(drops)
    detector.idle_from(300.0)
    for at, probability in enumerate(probabilities):
        if at in forgotten:
            detector.drop(min(forgotten[at], FRAME * at))
        begins = [
            event.audio_start_ms
            for event in detector.write([(FRAME * (at + 1), probability)])
            if not isinstance(event, SpeechStopped)
        ]
        assert all(begin >= needed for begin in begins)
        assert detector.needed_from_ms >= needed
        needed = detector.needed_from_ms
