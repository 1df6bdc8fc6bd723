"""The judges of the accuracy tests find what is wrong."""

from __future__ import annotations

import numpy as np
import pytest

from tests.accuracy.answers import Answer
from tests.accuracy.broken import others, table
from tests.accuracy.cases import Case, cases
from tests.accuracy.figures import LEAST, MANY, PITCH_HZ, figures, too_low, voice_of

SAY = Case("say-0", "say", "say red two", ("red", "two"), "chelsie")
HEAR = Case("hear-0", "hear", [], ("red", "two"))


def tone(hertz: float, seconds: float = 1.0) -> np.ndarray:
    """Pulses at a pitch, as a voice makes them."""
    sound = np.zeros(int(24_000 * seconds))
    sound[:: round(24_000 / hertz)] = 1
    return (np.convolve(sound, np.hanning(40), "same") * 20_000).astype(np.int16)


@pytest.mark.parametrize("voice", PITCH_HZ)
def test_a_voice_is_told_by_its_pitch(voice: str) -> None:
    silence = np.zeros(24_000, np.int16)
    assert voice_of(np.concatenate([silence, tone(PITCH_HZ[voice]), silence])) == voice


@pytest.mark.parametrize("sound", [np.zeros(0, np.int16), np.zeros(24_000, np.int16), tone(100)[:500]])
def test_silence_has_no_voice(sound: np.ndarray) -> None:
    assert voice_of(sound) is None


def test_figures_count_words_by_kind_and_judge() -> None:
    answers = {"say-0": Answer("red two", tone(200)), "hear-0": Answer("two")}
    found = figures([SAY, HEAR], answers, {"deaf": lambda sound: (), "sharp": lambda sound: ("red", "two")})
    assert found == {"say: text": 1, "voice": 1, "say: deaf": 0, "say: sharp": 1, "hear: text": 0.5}


def test_what_is_too_low_and_what_is_another_answer() -> None:
    assert too_low({"say: text": 0.5, "voice": 1.0}, [SAY, HEAR]) == {"say: text": 0.5}
    assert too_low({"hear: text": 0.96}, [HEAR] * (MANY - 1)) == {}
    assert too_low({"hear: text": 0.96}, [HEAR] * MANY) == {"hear: text": 0.96}
    usual = {"a": Answer("red", tone(200)), "b": Answer("two", likelihood=-0.5), "c": Answer("one")}
    same = {"a": Answer("red", tone(200) + np.int16(1)), "b": Answer("two", likelihood=-0.5004), "c": Answer("one")}
    assert others(same, usual) == []
    changed = {"a": Answer("red", tone(200)[:-1]), "b": Answer("two", likelihood=-0.6), "c": Answer("won")}
    assert others(changed, usual) == ["a", "b", "c"]


def test_the_table_marks_what_is_too_low() -> None:
    head, rule, line = table({"none": dict.fromkeys(LEAST, 1.0) | {"voice": 0.5}}, {"none": 3}, cases(6)).splitlines()
    assert head.count("|") == rule.count("|") == line.count("|")
    assert "**0.50**" in line and line.count("**") == 2 and line.endswith("3 of 30 |")


def test_cases_are_the_same_every_time_and_a_larger_number_has_more() -> None:
    assert [(case.name, case.words) for case in cases(3)] == [(case.name, case.words) for case in cases(4)][:15]
    assert {case.kind for case in cases(1)} == {"text", "say", "hear", "repeat", "see"}
    assert {case.voice for case in cases(8) if case.kind in ("say", "repeat")} == set(PITCH_HZ)
