"""The training data: requests with right replies, sounds and pictures of the stated length, codes that tell apart."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from training.tiny_omni import codes, listening, pictures, tasks
from training.tiny_omni.world import DIGITS, FRAME, WEEKDAYS, WORDS


def digit(word: str) -> int:
    return DIGITS.index(word)


def add_is_right(request: list[str], reply: list[str]) -> bool:
    return digit(request[1]) + digit(request[3]) == digit(reply[0])


def sort_is_right(request: list[str], reply: list[str]) -> bool:
    return sorted(map(digit, request[1:])) == list(map(digit, reply))


def after_is_right(request: list[str], reply: list[str]) -> bool:
    step = {"after": 1, "before": -1}[request[2]]
    row = WEEKDAYS if request[3] in WEEKDAYS else DIGITS
    place = row.index(request[3]) + step
    return reply == [row[place % 7 if row is WEEKDAYS else place]] and (row is WEEKDAYS or 0 <= place <= 9)


RIGHT: dict[tasks.Task, Callable[[list[str], list[str]], bool]] = {
    tasks.say: lambda request, reply: request[1:] == reply,
    tasks.reverse: lambda request, reply: request[1:] == reply[::-1],
    tasks.add: add_is_right,
    tasks.sort: sort_is_right,
    tasks.after: after_is_right,
}


@pytest.mark.parametrize("task", tasks.TASKS)
def test_replies_are_right(task: tasks.Task) -> None:
    random = np.random.default_rng(0)
    for _ in range(200):
        request, reply = task(random)
        assert RIGHT[task](request.split(), reply), (request, reply)
        assert set(reply) <= set(WORDS)


def test_the_same_seed_gives_the_same_requests() -> None:
    first, second = ([tasks.text_task(np.random.default_rng(3)) for _ in range(9)] for _ in range(2))
    assert first == second


def test_tokens_of_a_sound_are_those_of_transformers() -> None:
    from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as theirs

    frames = range(1, 700)
    expected = [int(theirs._get_feat_extract_output_lengths(torch.tensor(count))) for count in frames]
    assert [listening.audio_tokens(count) for count in frames] == expected


def test_a_disturbed_sound_is_whole_hops_and_still_the_sound() -> None:
    random = np.random.default_rng(0)
    sound = np.sin(np.arange(16_001) / 9).astype(np.float32)
    changed = listening.disturbed(sound, random)
    assert len(changed) % listening.HOP == 0
    assert np.corrcoef(changed[: len(sound)], sound)[0, 1] > 0.9


def test_pictures_differ_by_what_they_are_named_after() -> None:
    random = np.random.default_rng(0)
    drawn = [pictures.picture(random) for _ in range(100)]
    assert {image.size for image, _ in drawn} == {(side, side) for side in pictures.SIDES}
    assert all(set(name) <= set(WORDS) for _, name in drawn)
    reds = [np.asarray(image, int) for image, name in drawn if name[0] == "red"]
    assert reds
    assert all(((pixels[..., 0] - pixels[..., 2]) > 100).mean() > 0.1 for pixels in reds)


def test_different_frames_get_different_codes_and_none_is_silence() -> None:
    random, time = np.random.default_rng(0), np.arange(FRAME) / 24_000
    sounds = [np.sin(2 * np.pi * hertz * time) * 0.2 for hertz in range(200, 8000, 60)]
    points = np.concatenate([codes.features(sound.astype(np.float32), int(random.integers(2))) for sound in sounds])
    books = codes.fit(points, groups=4, size=64, seed=0)
    found = books.encode(points)
    assert len(np.unique(found, axis=0)) > 0.95 * len(sounds)
    assert found.min() >= 1
    assert np.array_equal(found, codes.fit(points, groups=4, size=64, seed=0).encode(points))


def test_starting_vectors_are_about_the_features() -> None:
    points = np.random.default_rng(0).normal(size=(200, len(codes.silence_features())))
    books = codes.fit(points, groups=4, size=64, seed=0)
    vectors = codes.starting_vectors(books, 16, points)
    means = np.mean([vectors[group, books.encode(points)[:, group]] for group in range(4)], axis=0)
    assert vectors.shape == (4, 64, 16)
    assert 0.6 < np.mean(means**2) < 1.3
