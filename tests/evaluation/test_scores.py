"""Scores and their statistics."""

from __future__ import annotations

import pytest

from vllm_omni_ext.evaluation.report import Estimate, compare, estimate
from vllm_omni_ext.evaluation.scores import choice, exact, letter, words, words_of


@pytest.mark.parametrize(
    ("answer", "expected", "both"),
    [
        ("Seven, blue left.", "seven blue left", (1, 1)),
        ("seven left", "seven blue left", (0, 2 / 3)),
        ("seven green left", "seven blue left", (0, 2 / 3)),
        ("", "red", (0, 0)),
        ("red red red red", "red", (0, 0)),
        ("", "", (1, 1)),
        ("12 dogs don\u2019t bark", "twelve dogs don't bark!", (1, 1)),
        ("21 and 305", "twenty-one and three hundred five", (1, 1)),
        ("1,250 km", "one thousand two hundred fifty km", (1, 1)),
        ("999999", "nine hundred ninety-nine thousand nine hundred ninety-nine", (1, 1)),
        ("\uff33\uff25\uff36\uff25\uff2e", "seven", (1, 1)),
        ("今天天气很好", "今天天气真好。", (0, 5 / 6)),
        ("东京", "東京", (0, 0.5)),
    ],
)
def test_words_are_compared_without_case_punctuation_and_forms(
    answer: str, expected: str, both: tuple[float, float]
) -> None:
    assert (exact(answer, expected), words(answer, expected)) == pytest.approx(both)
    assert exact(expected, answer) == both[0]


def test_large_numbers_and_parts_of_words_stay_digits() -> None:
    assert words_of("007 1000000 b52") == ["007", "1000000", "b52"]
    assert words_of("GPU很快, ok") == ["gpu", "很", "快", "ok"]


CHOICES = """
B: b
B: **B**
B: B.
B: B) blue
B: (B) because C is wrong
B: B because C is wrong
B: answer: (b)
B: I think the answer is B, because a dog is no cat
B: First I thought of A. The answer is B.
B: A closer look shows that it is B.
B: A dog barks, so it must be (B)
B: Both A and C are wrong, so I choose B
B: My choice would be B
B: The answer is (B), since option C is too long.
B: Option B is correct; option A is not.
B: Option A isn't right, so B
B: 答案是B
A: A, since dogs bark
A: I would pick A
A: It is A.
I: The answer is I.
-: A dog barks
-: The answer is a bit complicated
-: A or B
-: b, c
-: Bees
-: It's a dog
-:
"""


@pytest.mark.parametrize("line", CHOICES.strip().splitlines())
def test_a_choice_is_the_letter_that_an_answer_names(line: str) -> None:
    right, _, answer = line.partition(":")
    assert letter(answer.strip()) == (None if right == "-" else right)
    assert choice(answer.strip(), f" {right.lower()} ") == float(right != "-")


def test_an_interval_has_the_mean_and_shrinks_with_more_items() -> None:
    few, many = estimate([0, 1] * 10), estimate([0, 1] * 1000)
    for each in (few, many):
        assert each.mean == 0.5 and each.low < 0.5 < each.high
    assert few.high - few.low > 5 * (many.high - many.low)
    assert estimate([1.0] * 5) == estimate([1.0] * 50)


def test_the_interval_of_one_item_is_its_score() -> None:
    assert estimate([0.5]) == Estimate(0.5, 0.5, 0.5)


@pytest.mark.parametrize(("better", "worse", "p"), [(0, 0, 1), (1, 0, 1), (5, 0, 0.0625), (0, 6, 0.03125), (3, 3, 1)])
def test_the_sign_test_gives_exact_probabilities(better: int, worse: int, p: float) -> None:
    earlier = {str(item): 0.5 for item in range(12)}
    now = earlier | {str(item): float(item < better) for item in range(better + worse)}
    assert compare(now, earlier).p == pytest.approx(p)


def test_runs_are_compared_item_by_item() -> None:
    earlier = {str(number): 1.0 for number in range(20)}
    same = compare(earlier, earlier)
    assert (same.items, same.difference.mean, same.p, same.is_worse) == (20, 0, 1, False)
    worse = compare({name: float(int(name) % 2) for name in earlier}, earlier)
    assert (worse.better, worse.worse, worse.is_worse) == (0, 10, True) and worse.p < 0.01
    one_less = compare(earlier | {"3": 0.0}, earlier)
    assert not one_less.is_worse, "one item of twenty may be chance"
    with pytest.raises(KeyError):
        compare(earlier | {"new": 0.0}, earlier)
