"""Every word of the closed world is one token, for the tokenizer that serves requests too."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer

from training.tiny_omni.words import REQUEST_WORDS, chat, ids_of, ordered, split, world_vocabulary
from training.tiny_omni.world import WORDS
from vllm_omni_ext.model_plugins.qwen3_omni.tiny.texts import tokenizer_json

TEXTS = [
    chat("say seven blue left"),
    chat("<|audio_start|><|audio_pad|><|audio_pad|><|audio_end|>what you hear"),
    chat("what you see<|vision_start|><|image_pad|><|vision_end|>"),
    "thursday north three house music<|im_end|>",
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_str(json.dumps(tokenizer_json(world_vocabulary())))


@pytest.mark.parametrize("word", [*WORDS, *REQUEST_WORDS])
def test_a_word_is_one_token_with_and_without_a_space(tokenizer: Tokenizer, word: str) -> None:
    assert tokenizer.encode(word).tokens == [word]
    assert tokenizer.encode(" " + word).tokens == ["Ġ" + word]


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_the_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    assert ids_of(text, world_vocabulary()) == tokenizer.encode(text).ids


def test_ids_of_unknown_text_are_refused() -> None:
    with pytest.raises(KeyError):
        ids_of("say elephant", world_vocabulary())
    with pytest.raises(ValueError, match="more than words"):
        ids_of("say 7", world_vocabulary())


def test_words_whose_merges_disturb_each_other_are_ordered() -> None:
    words = ("three", "north")
    ranks = {pair: rank for rank, pair in enumerate(ordered(words))}
    assert [split(word, ranks) for word in words] == [["three"], ["north"]]
