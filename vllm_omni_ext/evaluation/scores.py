"""Computes scores from 0 to 1 of an answer from its expected answer."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

import jiwer

ONES = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
LARGEST = 999_999
"""Largest number that is converted to words."""

_WITHOUT_SPACES = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
"""Kana and Chinese characters. Each is counted as a word, so the word error rate is the character error rate."""
_WORD = re.compile(rf"[{_WITHOUT_SPACES}]|(?:(?![{_WITHOUT_SPACES}])\w)+(?:'\w+)?")


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation. Integers are converted to English words."""
    plain = unicodedata.normalize("NFKC", text).replace("\u2019", "'").casefold()
    plain = re.sub(r"(?<=\d),(?=\d{3}\b)", "", plain)
    return _WORD.findall(re.sub(r"(?<!\w)\d+(?!\w)", lambda found: f" {number(found.group())} ", plain))


def number(digits: str) -> str:
    """Return a number in English words; its digits if it is larger than LARGEST or has leading zeros."""
    value = int(digits) if len(digits) <= len(str(LARGEST)) else LARGEST + 1
    return _in_words(value) if value <= LARGEST and str(value) == digits else digits


def _in_words(value: int) -> str:
    for unit, name in ((1000, "thousand"), (100, "hundred")):
        if value >= unit:
            rest = f" {_in_words(value % unit)}" if value % unit else ""
            return f"{_in_words(value // unit)} {name}{rest}"
    if value < len(ONES):
        return ONES[value]
    return TENS[value // 10] + (f" {ONES[value % 10]}" if value % 10 else "")


def exact(answer: str, expected: str) -> float:
    """Return 1 if both texts have the same words in the same order, else 0."""
    return float(words_of(answer) == words_of(expected))


def words(answer: str, expected: str) -> float:
    """Return 1 minus the word error rate, at least 0."""
    return max(0.0, 1 - jiwer.wer(" ".join(words_of(expected)), " ".join(words_of(answer))))


_OPEN, _CLOSE = r"[\s*_(\[\"'`]*", r"[*_)\]\"'`]*"
_BEFORE, _AFTER = r"(?<![A-Za-z0-9_'])", r"(?![A-Za-z0-9_'])"
"""Before and after a single letter: no other letter, digit or quote. Chinese characters are allowed."""
_END = rf"{_CLOSE}\s*(?:[.,;:!?]|$)"
_IS = r"(?:\s+(?:is|was|must be|should be|would be))?\s*[:=]?"
_LETTER = rf"{_OPEN}(?:([A-Z]){_AFTER}|([a-z]){_END})"
"""Matches the letter of an option; a lower-case letter only at the end of a clause, unlike "the answer is a dog"."""
_FORMS = (
    # Only a letter: "B", "(b).", "**B**".
    re.compile(rf"^{_OPEN}([A-Za-z]){_CLOSE}[\s.,;:!?]*$"),
    # A statement: "the answer is B", "Answer: (b)".
    re.compile(rf"(?i:\b(?:answer|correct one|right one)\b{_IS}){_LETTER}"),
    re.compile(rf"(?i:\b(?:choice|option)\b{_IS}){_LETTER}"),
    # A label at the beginning: "B. Because", "(B) because", "a) red".
    re.compile(r"^[\s*_]*(?:\(([A-Za-z])\)|([A-Za-z])[).:\]])"),
    # A letter at the beginning of a sentence: "B because C is wrong", "A, since". "A dog" and "I think" are words.
    re.compile(rf"^[\s*_]*(?:([B-HJ-Z]){_AFTER}|(A)(?=\s*[,;\u2013\u2014-]|\s+(?:because|since|is|as)\b))"),
    # The last letter in parentheses.
    re.compile(r".*\(([A-Za-z])\)", re.DOTALL),
    # The last single capital letter that is not an English word.
    re.compile(rf".*{_BEFORE}(?:([B-HJ-Z]){_AFTER}|([AI]){_END})", re.DOTALL),
)
_DENIED = re.compile(
    rf"(?i:\b(?:choice|option|answer)\s+)?{_BEFORE}\(?[A-Z]\)?\s+(?:is|are|was|were)(?:n't|\s+(?:not|wrong|incorrect|false))\b"
)
"""Matches a letter that the answer rejects: "A is wrong, so B"."""
_UNDECIDED = re.compile(r"\W*\b[A-Za-z]\b\W*(?:or|and|/|,)\W*\b[A-Za-z]\b\W*")
"""Matches an answer that consists of two letters: "A or B"."""


def letter(answer: str) -> str | None:
    """Return the upper-case letter of the option that an answer to a multiple-choice question selects, or None."""
    if _UNDECIDED.fullmatch(answer):
        return None
    left = _DENIED.sub("", answer)
    for form in _FORMS:
        if found := list(form.finditer(left)):
            return next(each for each in found[-1].groups() if each).upper()
    return None


def choice(answer: str, expected: str) -> float:
    """Return 1 if the answer selects the option with the expected letter, else 0."""
    return float(letter(answer) == expected.strip().upper())


SCORERS: dict[str, Callable[[str, str], float]] = {"exact": exact, "words": words, "choice": choice}
