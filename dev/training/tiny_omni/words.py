"""The trained model's vocabulary: bytes, and an id for each word of `world.WORDS` and `REQUEST_WORDS`.

A word has two ids, with and without a space before it, so that the talker receives one text id for each word.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from functools import cache

from dev.training.tiny_omni.world import WORDS
from vllm_omni_ext.model_plugins.qwen3_omni.tiny.vocabulary import (
    ROLE_IDS,
    SPECIAL_TOKENS,
    Vocabulary,
    byte_letters,
    word_merges,
)

REQUEST_WORDS = (
    "say",
    "repeat",
    "reverse",
    "sort",
    "add",
    "and",
    "what",
    "comes",
    "after",
    "before",
    "you",
    "hear",
    "see",
)
SPACE, LINE_END = "Ġ", "Ċ"
PIECE = re.compile(r"<[^<>]+>|\n| ?[a-z]+")
Merge = tuple[str, str]


def split(word: str, ranks: dict[Merge, int]) -> list[str]:
    """Return the BPE tokens of a word; `ranks` has the position of each merge in the tokenizer's list of merges."""
    parts = list(word)
    while True:
        found = [(ranks[pair], i) for i, pair in enumerate(itertools.pairwise(parts)) if pair in ranks]
        if not found:
            return parts
        _, i = min(found)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def ordered(words: Sequence[str], rounds: int = 10_000) -> tuple[Merge, ...]:
    """Return a list of BPE merges with which each word is one token.

    The merges are made word by word. While a word has several tokens, it is moved to the beginning of the words.

    Raises:
        ValueError: after `rounds` attempts a word still has several tokens.
    """
    order = list(words)
    for _ in range(rounds):
        merges = word_merges(tuple(order))
        ranks = {pair: rank for rank, pair in enumerate(merges)}
        broken = next((word for word in order if len(split(word, ranks)) > 1), None)
        if broken is None:
            return merges
        order.remove(broken)
        order.insert(0, broken)
    raise ValueError(f"no order of merges keeps {broken!r} whole; leave out a word")


@cache
def world_vocabulary() -> Vocabulary:
    """Return the vocabulary of a few hundred ids."""
    words = (*WORDS, *REQUEST_WORDS)
    merges = ordered((*[SPACE + word for word in words], *words, *ROLE_IDS))
    tokens = [*byte_letters(), *("".join(pair) for pair in merges)]
    ids = {token: index for index, token in enumerate(tokens)}
    return Vocabulary(ids, merges, {token: len(ids) + index for index, token in enumerate(SPECIAL_TOKENS)})


def ids_of(text: str, vocabulary: Vocabulary) -> list[int]:
    """Return the token ids of a text that consists of words, special tokens and line ends.

    Raises:
        KeyError: a word has no id.
        ValueError: the text has other characters.
    """
    pieces = PIECE.findall(text)
    if "".join(pieces) != text:
        raise ValueError(f"{text!r} has more than words, special tokens and line ends")
    named = {"\n": LINE_END}
    return [vocabulary.id_of(named.get(piece, piece.replace(" ", SPACE))) for piece in pieces]


def chat(request: str) -> str:
    """Return the chat prompt of a request, as the chat template writes it."""
    return f"<|im_start|>user\n{request}<|im_end|>\n<|im_start|>assistant\n"
