"""Pictures: sizes after a resize, transparency, the order of patches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from vllm_omni_ext.model_plugins.bagel import images
from vllm_omni_ext.model_plugins.bagel.sizes import ResizeRule

VAE, VIT = ResizeRule(1024, 512, 16), ResizeRule(980, 224, 14)


@pytest.mark.parametrize(
    ("size", "rule", "expected"),
    [
        ((1024, 1024), VAE, (1024, 1024)),
        ((4000, 3000), VAE, (1024, 768)),
        ((300, 200), VAE, (768, 512)),
        ((100, 100), VAE, (512, 512)),
        ((1, 1), VAE, (512, 512)),
        ((3000, 100), VAE, (1024, 32)),
        ((700, 520), VAE, (704, 512)),
        ((1024, 768), VIT, (980, 728)),
        ((768, 512), VIT, (770, 518)),
        ((74, 58), ResizeRule(96, 48, 16), (80, 64)),
    ],
)
def test_sizes(size: tuple[int, int], rule: ResizeRule, expected: tuple[int, int]) -> None:
    assert images.resized_size(*size, rule) == expected
    assert images.resize(Image.new("RGB", size), rule).size == expected


@given(st.integers(1, 30_000), st.integers(1, 30_000), st.sampled_from([VAE, VIT, ResizeRule(96, 48, 16)]))
def test_no_picture_leaves_the_tables_of_positions(width: int, height: int, rule: ResizeRule) -> None:
    size = images.resized_size(width, height, rule)
    assert max(size) <= rule.longest
    assert all(side >= rule.stride and side % rule.stride == 0 for side in size)


def test_a_picture_that_has_its_size_is_not_touched() -> None:
    picture = Image.new("RGB", (512, 512))
    assert images.resize(picture, VAE) is picture


def test_transparency_is_laid_over_white() -> None:
    rgba = Image.new("RGBA", (2, 1), (255, 0, 0, 255))
    rgba.putpixel((1, 0), (0, 0, 0, 0))
    assert [images.to_rgb(rgba).getpixel((x, 0)) for x in (0, 1)] == [(255, 0, 0), (255, 255, 255)]
    palette = Image.new("P", (1, 1), 0)
    palette.info["transparency"] = 0
    assert images.to_rgb(palette).getpixel((0, 0)) == (255, 255, 255)
    assert images.to_rgb(Image.new("L", (1, 1), 7)).getpixel((0, 0)) == (7, 7, 7)


def test_pixels_are_from_minus_one_to_one() -> None:
    picture = Image.fromarray(np.array([[[0, 255, 51]]], dtype=np.uint8))
    assert images.to_pixels(picture).flatten().tolist() == pytest.approx([-1.0, 1.0, -0.6])


def test_patches_are_in_row_column_channel_order() -> None:
    channel, row, column = torch.meshgrid(torch.arange(3), torch.arange(4), torch.arange(6), indexing="ij")
    patches = images.to_patches(channel * 10000 + row * 100 + column, 2)
    assert patches.shape == (6, 12)
    assert patches[0].tolist() == [0, 10000, 20000, 1, 10001, 20001, 100, 10100, 20100, 101, 10101, 20101]
    assert patches[1, 0] == 2
    assert patches[3, 0] == 200


def test_latents_come_back_from_tokens() -> None:
    latents = torch.rand(16, 4, 6)
    assert torch.equal(images.to_latents(images.to_tokens(latents, 2), 2, 2), latents)


def test_places_step_by_the_side_of_the_table() -> None:
    assert images.places(2, 3, 16).tolist() == [0, 1, 2, 16, 17, 18]


def test_bytes_are_clamped_and_cut_off() -> None:
    pixels = torch.tensor([-3.0, 3.0, 0.0, 0.999]).view(1, 1, 4).expand(3, 1, 4)
    assert images.to_bytes(pixels)[0, :, 0].tolist() == [0, 255, 127, 254]
