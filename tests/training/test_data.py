"""The training data: right replies, positions of words in sounds, pictures, codes, and recognised words."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from dev.training.tiny_omni import listening, tasks
from dev.training.tiny_omni.encoders import places
from dev.training.tiny_omni.listening import HOP
from dev.training.tiny_omni.turns import Turn
from dev.training.tiny_omni.world import DIGITS, WEEKDAYS, WORDS


def after_is_right(request: list[str], reply: list[str]) -> bool:
    row = WEEKDAYS if request[3] in WEEKDAYS else DIGITS
    place = row.index(request[3]) + {"after": 1, "before": -1}[request[2]]
    return reply == [row[place % 7 if row is WEEKDAYS else place]] and (row is WEEKDAYS or 0 <= place <= 9)


digit = DIGITS.index
RIGHT: dict[tasks.Task, Callable[[list[str], list[str]], bool]] = {
    tasks.say: lambda request, reply: request[1:] == reply,
    tasks.reverse: lambda request, reply: request[1:] == reply[::-1],
    tasks.add: lambda request, reply: digit(request[1]) + digit(request[3]) == digit(reply[0]),
    tasks.sort: lambda request, reply: sorted(map(digit, request[1:])) == list(map(digit, reply)),
    tasks.after: after_is_right,
}


@pytest.mark.parametrize("task", tasks.TASKS)
def test_replies_of_the_training_data_are_right(task: tasks.Task) -> None:
    random = np.random.default_rng(0)
    for _ in range(50):
        request, reply = task(random)
        assert RIGHT[task](request.split(), reply), (request, reply)
        assert set(reply) <= set(WORDS)


def test_tokens_of_a_sound_are_those_of_transformers() -> None:
    from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as theirs

    frames = range(1, 700)
    expected = [int(theirs._get_feat_extract_output_lengths(torch.tensor(count))) for count in frames]
    assert [listening.audio_tokens(count) for count in frames] == expected


def test_a_sample_belongs_to_an_embedding_of_its_chunk() -> None:
    """The encoder makes 13 embeddings of 100 mel frames: 12 of 8 frames each, and one of 4."""
    frames = 0, 7, 8, 96, 99, 100, 107, 108, 250
    assert [listening.token_of(frame * HOP) for frame in frames] == [0, 0, 1, 12, 12, 13, 13, 14, 32]
    for count in range(1, 400):
        assert listening.token_of(count * HOP - 1) == listening.audio_tokens(count) - 1


def test_places_of_words_in_several_sounds_follow_each_other() -> None:
    first = Turn("", ["red"], np.zeros(100 * HOP), middles=(50 * HOP,))
    second = Turn("", ["blue", "no"], np.zeros(120 * HOP), middles=(10 * HOP, 115 * HOP))
    found = places([first, second]).tolist()
    assert len(found) == listening.audio_tokens(100) + listening.audio_tokens(120)
    assert {at: WORDS[each - 1] for at, each in enumerate(found) if each} == {6: "red", 14: "blue", 13 + 14: "no"}
