"""Words of the closed world: each is one token of the serving tokenizer; recognised words are compared in order."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer

from dev.training.tiny_omni.judge import heard_words, right_words
from dev.training.tiny_omni.words import REQUEST_WORDS, chat, ids_of, world_vocabulary
from dev.training.tiny_omni.world import WORDS
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


def test_a_word_is_one_token_with_and_without_a_space(tokenizer: Tokenizer) -> None:
    for word in (*WORDS, *REQUEST_WORDS):
        assert [tokenizer.encode(text).tokens for text in (word, f" {word}")] == [[word], [f"Ġ{word}"]]


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_the_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    assert ids_of(text, world_vocabulary()) == tokenizer.encode(text).ids


def test_ids_of_unknown_text_are_refused() -> None:
    with pytest.raises(KeyError):
        ids_of("say elephant", world_vocabulary())
    with pytest.raises(ValueError, match="more than words"):
        ids_of("say 7", world_vocabulary())


def test_words_of_a_transcript_are_compared_in_their_order() -> None:
    assert " ".join(heard_words(" Seven, blue... the 6th, 74; to won")) == "seven blue the six seven four two one"
    assert right_words(["a", "b", "c"], ["b", "c", "a"]) == [False, True, True]
    assert right_words(["a", "b", "a"], ["x", "a", "x", "x", "b", "x"]) == [True, True, False]
