"""Targets of the encoders: which word is where in a sound, and what a picture shows."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from training.tiny_omni.encoders import WordScores, heard_loss, places, seen_loss
from training.tiny_omni.listening import HOP, RATE, Voices, audio_tokens, token_of
from training.tiny_omni.turns import Turn
from training.tiny_omni.words import ids_of, world_vocabulary
from training.tiny_omni.world import WORDS

HIDDEN = 64


@pytest.fixture
def scores() -> WordScores:
    table = torch.nn.Embedding(1000, HIDDEN)
    thinker = SimpleNamespace(model=SimpleNamespace(embed_tokens=table))
    with torch.no_grad():
        table.weight.normal_(generator=torch.Generator().manual_seed(0))
    return WordScores(thinker)


def row_of(scores: WordScores, word: str) -> torch.Tensor:
    """An embedding that is a word's, and so long that no other scores nearly as much."""
    (id_,) = ids_of(f" {word}", world_vocabulary())
    return scores._table[id_].detach() * 10


def test_a_sample_belongs_to_an_embedding_of_its_chunk() -> None:
    """Of 100 mel frames the encoder makes 13 embeddings, each of 8 frames; the last has 4."""
    assert [token_of(frame * HOP) for frame in (0, 7, 8, 96, 99, 100, 107, 108, 250)] == [
        0,
        0,
        1,
        12,
        12,
        13,
        13,
        14,
        32,
    ]
    for count in range(1, 400):
        assert token_of(count * HOP - 1) == audio_tokens(count) - 1


def test_middles_of_words_are_in_the_words() -> None:
    loud = {f"{word}/0": np.full(RATE // 2, 1 + at, np.float32) for at, word in enumerate(("red", "blue"))}
    random = np.random.default_rng(0)
    sound, middles = Voices(loud).say(["red", "blue", "red"], random)
    levels = [np.abs(sound[middle - 1000 : middle + 1000]).mean() for middle in middles]
    assert levels[1] > 1.5 * levels[0] and levels[1] > 1.5 * levels[2] > 0


def test_places_of_several_sounds_follow_each_other() -> None:
    first = Turn("", ["red"], np.zeros(100 * HOP), middles=(50 * HOP,))
    second = Turn("", ["blue", "no"], np.zeros(120 * HOP), middles=(10 * HOP, 115 * HOP))
    found = places([first, second]).tolist()
    assert len(found) == audio_tokens(100) + audio_tokens(120)
    assert {at: WORDS[each - 1] for at, each in enumerate(found) if each} == {6: "red", 14: "blue", 13 + 14: "no"}


def test_embeddings_of_the_right_words_cost_nothing(scores: WordScores) -> None:
    turn = Turn("", ["red"], np.zeros(16 * HOP), middles=(12 * HOP,))
    with torch.no_grad():
        scores.nothing.copy_(-row_of(scores, "red"))
    made = torch.stack([scores.nothing.detach(), row_of(scores, "red")])
    loss, right = heard_loss(scores, made, [turn])
    assert loss.item() < 0.01 and right == 1
    loss, right = heard_loss(scores, made.flip(0), [turn])
    assert loss.item() > 1 and right == 0


def test_a_picture_is_named_by_all_words_of_its_name(scores: WordScores) -> None:
    turns = [Turn("", ["red", "circle"]), Turn("", ["seven"])]
    red, circle, seven = (row_of(scores, word)[None] for word in ("red", "circle", "seven"))
    loss, right = seen_loss(scores, [torch.cat([red, circle]), seven], turns)
    assert right == 1
    worse, right = seen_loss(scores, [torch.cat([red, seven]), seven], turns)
    assert right == 0.5 and worse > loss
