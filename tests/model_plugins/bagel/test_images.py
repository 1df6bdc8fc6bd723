"""Pictures: sizes after a resize, transparency, the order of patches, and vLLM's processor for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.support.bagel_runs import picture
from vllm_omni_ext.model_plugins.bagel import images
from vllm_omni_ext.model_plugins.bagel.model import Bagel
from vllm_omni_ext.model_plugins.bagel.sizes import ResizeRule

VAE, VIT = ResizeRule(1024, 512, 16), ResizeRule(980, 224, 14)


@pytest.mark.parametrize(
    ("size", "rule", "expected"),
    [
        ((1024, 1024), VAE, (1024, 1024)),
        ((2000, 1500), VAE, (1024, 768)),
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
def test_sizes_after_a_resize(size: tuple[int, int], rule: ResizeRule, expected: tuple[int, int]) -> None:
    assert images.resized_size(*size, rule) == expected
    source = Image.new("RGB", size)
    assert images.resize(source, rule).size == expected
    assert size != expected or images.resize(source, rule) is source


@given(st.integers(1, 30_000), st.integers(1, 30_000), st.sampled_from([VAE, VIT, ResizeRule(96, 48, 16)]))
def test_no_picture_leaves_the_tables_of_positions(width: int, height: int, rule: ResizeRule) -> None:
    size = images.resized_size(width, height, rule)
    assert max(size) <= rule.longest
    assert all(side >= rule.stride and side % rule.stride == 0 for side in size)


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


def test_latents_come_back_from_tokens_in_rows_of_the_table() -> None:
    latents = torch.rand(16, 4, 6)
    assert torch.equal(images.to_latents(images.to_patches(latents, 2), 2, 2), latents)
    assert images.places(2, 3, 16).tolist() == [0, 1, 2, 16, 17, 18]


def test_bytes_are_clamped_and_cut_off() -> None:
    pixels = torch.tensor([-3.0, 3.0, 0.0, 0.999]).view(1, 1, 4).expand(3, 1, 4)
    assert images.to_bytes(pixels)[0, :, 0].tolist() == [0, 255, 127, 254]


# -- vLLM's multimodal processor -----------------------------------------------------------------------

SIZES = [(96, 64), (40, 30), (300, 500), (64, 96), (17, 211), (96, 96)]
"""Height and width of pictures: smaller and larger than the limits of both resizes, and long ones."""


@pytest.fixture(scope="module")
def processor(checkpoint: Path) -> Any:
    """As an engine makes it, without a cache."""
    from vllm.config import ModelConfig
    from vllm.model_executor.models import registry
    from vllm.multimodal.processing import InputProcessingContext
    from vllm.tokenizers import cached_tokenizer_from_config

    from vllm_omni_ext.model_plugins.bagel.stages.processor import PictureDummies, PictureInfo, PictureProcessor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_run_in_subprocess", lambda inspect: inspect())
        config = ModelConfig(str(checkpoint), dtype="float32", max_model_len=512, enforce_eager=True)
    info = PictureInfo(InputProcessingContext(config, cached_tokenizer_from_config(config)))
    return PictureProcessor(info, PictureDummies(info))


def processed(processor: Any, prompt: str | list[int], pictures: Sequence[Any]) -> Any:
    return processor(prompt, processor.info.parse_mm_data({"image": list(pictures)}))


def items(found: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """`picture` and `vit` of each item."""
    data = [item.get_data() for item in found["mm_kwargs"]["image"]]
    return [(each["picture"], each["vit"]) for each in data]


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_both_resizes_equal_the_models(height: int, width: int, processor: Any, model: Bagel) -> None:
    source = picture(height, width, seed=3)
    found = processed(processor, "<|image_pad|>", [source])
    [(resized, vit)] = items(found)
    first = images.resize(images.to_rgb(source), model.sizes.vae_resize)
    assert torch.equal(resized, torch.from_numpy(np.array(first)))
    assert torch.equal(vit, torch.from_numpy(np.array(images.resize(first, model.sizes.vit_resize))))
    patches = vit.shape[0] * vit.shape[1] // model.sizes.vit.patch**2
    start, pad, end = processor.info.markers
    assert found["prompt_token_ids"] == [start, *[pad] * patches, end]
    [place] = found["mm_placeholders"]["image"]
    assert (place.offset, place.length, place.get_num_embeds()) == (0, patches + 2, patches + 2)
    assert patches + 2 <= processor.info.get_mm_max_tokens_per_item(512, {"image": 1})["image"]


def test_texts_and_pictures_keep_their_order(processor: Any) -> None:
    small, large = picture(48, 48, 1), picture(96, 64, 2)
    found = processed(processor, "a<|image_pad|><|image_pad|>b", [small, large])
    start, pad, end = processor.info.markers
    sizes = [vit.shape[0] * vit.shape[1] // 14**2 for _, vit in items(found)]
    a, b = (processor.info.get_tokenizer().encode(text) for text in "ab")
    blocks = [[start, *[pad] * size, end] for size in sizes]
    assert found["prompt_token_ids"] == [*a, *blocks[0], *blocks[1], *b]
    assert [place.offset for place in found["mm_placeholders"]["image"]] == [1, 1 + len(blocks[0])]


@pytest.mark.parametrize("prompt", ["what?", "<|vision_start|><|image_pad|><|vision_end|>what?"])
def test_prompts_without_or_with_another_models_places(prompt: str, processor: Any) -> None:
    source = picture(48, 48, 1)
    found = processed(processor, prompt, [source])
    assert found["prompt_token_ids"] == processed(processor, "<|image_pad|>what?", [source])["prompt_token_ids"]


def test_arrays_are_pictures_and_transparent_areas_are_white(processor: Any) -> None:
    source = picture(48, 64, 5)
    rows = np.array(source)
    expected = items(processed(processor, "x", [source]))[0][0]
    for array in (rows, rows.transpose(2, 0, 1)):
        assert torch.equal(items(processed(processor, "x", [array]))[0][0], expected)
    [(resized, vit)] = items(processed(processor, "x", [Image.new("RGBA", (64, 64), (255, 0, 0, 0))]))
    assert resized.min() == vit.min() == 255
    with pytest.raises(ValueError, match=r"image: .*not float32 \[4, 4, 3\]"):
        processed(processor, "x", [np.zeros((4, 4, 3), np.float32)])


def test_the_profiles_input_is_the_largest(processor: Any) -> None:
    found = processor.get_dummy_mm_inputs({"image": 2})
    most = processor.info.get_mm_max_tokens_per_item(512, {"image": 2})["image"]
    assert [place.length for place in found["mm_placeholders"]["image"]] == [most, most]
