"""The multimodal processor against the model's own reading of pictures, and against the reference's patches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.support.bagel_runs import golden, picture
from vllm_omni_ext.model_plugins.bagel.images import resize, to_patches, to_pixels, to_rgb
from vllm_omni_ext.model_plugins.bagel.model import Bagel

SIZES = [(96, 64), (40, 30), (300, 500), (64, 96), (17, 211), (96, 96)]
"""Height and width of pictures: smaller and larger than both resizes want them, and long ones."""


@pytest.fixture(scope="module")
def processor(checkpoint: Path) -> Any:
    """As an engine makes it, without a cache."""
    from vllm.config import ModelConfig
    from vllm.multimodal.processing import InputProcessingContext
    from vllm.tokenizers import cached_tokenizer_from_config

    from vllm_omni_ext.model_plugins.bagel.stages.processor import PictureDummies, PictureInfo, PictureProcessor

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
def test_both_resizes(height: int, width: int, processor: Any, model: Bagel) -> None:
    source = picture(height, width, seed=3)
    found = processed(processor, "<|image_pad|>", [source])
    [(resized, vit)] = items(found)
    first = resize(to_rgb(source), model.sizes.vae_resize)
    assert torch.equal(resized, torch.from_numpy(np.array(first)))
    assert torch.equal(vit, torch.from_numpy(np.array(resize(first, model.sizes.vit_resize))))
    patches = vit.shape[0] * vit.shape[1] // model.sizes.vit.patch**2
    start, pad, end = processor.info.markers
    assert found["prompt_token_ids"] == [start, *[pad] * patches, end]
    [place] = found["mm_placeholders"]["image"]
    assert (place.offset, place.length, place.get_num_embeds()) == (0, patches + 2, patches + 2)
    assert patches + 2 <= processor.info.get_mm_max_tokens_per_item(512, {"image": 1})["image"]


def test_the_references_patches(processor: Any, model: Bagel) -> None:
    run = golden("edit_fp32")
    [(resized, vit)] = items(processed(processor, "<|image_pad|>", [run.parts[0]]))
    assert torch.equal(to_pixels(Image.fromarray(resized.numpy()))[None], run.tensors["vae_pixels_0"])
    patches = to_patches(to_pixels(Image.fromarray(vit.numpy())), model.sizes.vit.patch)
    assert torch.equal(patches, run.tensors["vit_tokens_0"])


def test_the_order_of_texts_and_pictures(processor: Any) -> None:
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


def test_transparent_areas_are_white(processor: Any) -> None:
    clear = Image.new("RGBA", (64, 64), (255, 0, 0, 0))
    [(resized, vit)] = items(processed(processor, "<|image_pad|>", [clear]))
    assert resized.min() == vit.min() == 255


def test_arrays_are_pictures(processor: Any) -> None:
    source = picture(48, 64, 5)
    rows = np.array(source)
    expected = items(processed(processor, "x", [source]))[0][0]
    for given in (rows, rows.transpose(2, 0, 1)):
        assert torch.equal(items(processed(processor, "x", [given]))[0][0], expected)


def test_numbers_that_are_no_picture(processor: Any) -> None:
    with pytest.raises(ValueError, match=r"image: .*not float32 \[4, 4, 3\]"):
        processed(processor, "x", [np.zeros((4, 4, 3), np.float32)])


def test_the_profiles_input_is_the_largest(processor: Any) -> None:
    found = processor.get_dummy_mm_inputs({"image": 2})
    most = processor.info.get_mm_max_tokens_per_item(512, {"image": 2})["image"]
    assert [place.length for place in found["mm_placeholders"]["image"]] == [most, most]
