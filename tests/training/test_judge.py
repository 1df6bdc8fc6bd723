"""What was said and what was heard are compared word by word."""

from __future__ import annotations

import pytest

from training.tiny_omni.judge import heard_words, right_words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (" Seven, blue... LEFT!", ["seven", "blue", "left"]),
        ("746", ["seven", "four", "six"]),
        ("Saturday the 6th", ["saturday", "the", "six"]),
        ("For to, won ate", ["four", "two", "one", "eight"]),
        ("", []),
    ],
)
def test_a_transcript_gives_words(text: str, words: list[str]) -> None:
    assert heard_words(text) == words


@pytest.mark.parametrize(
    ("said", "heard", "right"),
    [
        ("a b c", "a b c", [True, True, True]),
        ("a b c", "a x c", [True, False, True]),
        ("a b c", "b c a", [False, True, True]),
        ("a a", "a", [True, False]),
        ("a b", "", [False, False]),
        ("a b", "x a x x b x", [True, True]),
    ],
)
def test_words_in_their_order_are_right(said: str, heard: str, right: list[bool]) -> None:
    assert right_words(said.split(), heard.split()) == right
