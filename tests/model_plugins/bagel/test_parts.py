"""A rendered prompt becomes texts and pictures in their order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.support.bagel_runs import picture
from vllm_omni_ext.errors import RequestFailed
from vllm_omni_ext.model_plugins.bagel.images import resize
from vllm_omni_ext.model_plugins.bagel.model import Bagel
from vllm_omni_ext.model_plugins.bagel.requests.parts import picture_part, split_prompt, text_ids
from vllm_omni_ext.model_plugins.bagel.requests.payloads import Picture, Text, last_size

START, END, PAD = -1, -2, 9
TOKENS: Any = SimpleNamespace(start=START, end=END)
PIXELS = torch.arange(16 * 32 * 3, dtype=torch.uint8).reshape(16, 32, 3)


def feature(offset: int, length: int = 2, pixels: torch.Tensor = PIXELS) -> Any:
    where = SimpleNamespace(offset=offset, length=length)
    return SimpleNamespace(mm_position=where, data={"picture": SimpleNamespace(data=pixels)})


PIECE = Picture(16, 32, PIXELS.numpy().tobytes())


@pytest.mark.parametrize(
    ("ids", "at", "parts"),
    [
        ([1, 2], (), [Text([START, 1, 2, END])]),
        ([START, 1, 2, END], (), [Text([START, 1, 2, END])]),
        ([START, 1, END, START], (), [Text([START, 1, END])]),
        ([START, 1, END, START, 2, END], (), [Text([START, 1, END]), Text([START, 2, END])]),
        ([START, END], (), [Text([START, END])]),
        ([START, 1], (), [Text([START, 1, END])]),
        ([PAD, PAD, 1], (0,), [PIECE, Text([START, 1, END])]),
        ([START, 1, PAD, PAD, 2, END, START], (2,), [Text([START, 1, END]), PIECE, Text([START, 2, END])]),
        ([PAD, PAD, PAD, PAD, START, 1, END, START], (2, 0), [PIECE, PIECE, Text([START, 1, END])]),
        ([], (), []),
        ([START], (), []),
    ],
)
def test_prompts(ids: list[int], at: tuple[int, ...], parts: list[Any]) -> None:
    found = split_prompt(ids, [feature(offset) for offset in at], TOKENS)
    assert found == parts


def test_a_picture_that_is_elsewhere_is_an_error_and_not_another_picture() -> None:
    gone = feature(0)
    gone.data = None
    with pytest.raises(RequestFailed):
        split_prompt([PAD, PAD], [gone], TOKENS)


def test_a_picture_is_resized_for_the_autoencoder_with_white_behind_it(model: Bagel) -> None:
    source, rule = picture(60, 84, 1), model.sizes.vae_resize
    part = picture_part(source, rule)
    expected = np.asarray(resize(source, rule))
    assert (part.height, part.width) == expected.shape[:2]
    np.testing.assert_array_equal(np.frombuffer(part.pixels, np.uint8).reshape(expected.shape), expected)
    clear = picture_part(Image.new("RGBA", (64, 64), (0, 0, 0, 0)), rule)
    assert set(clear.pixels) == {255}


def test_sizes_and_ids() -> None:
    parts = [Text([1]), PIECE, Text([2]), Picture(48, 64, b""), Text([3])]
    assert last_size(parts) == (48, 64)
    assert last_size([Text([1])]) is None
    assert text_ids(parts) == [1, 2, 3]
