"""vLLM's multimodal processor of both pipelines: resizes pictures and inserts their placeholders into the prompt.

An item has two uint8 tensors: `picture`, resized for the autoencoder, and `vit`, the same picture resized for the ViT.
Its placeholder is a start marker, one pad token for each patch, and an end marker. The item's embeddings replace all of
these tokens, including the markers, because all of them attend to each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers.feature_extraction_utils import BatchFeature
from vllm.config.multimodal import MultiModalDummyOptions
from vllm.inputs import MultiModalDataDict, MultiModalInput
from vllm.multimodal.image import normalize_image
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems
from vllm.multimodal.parse import MultiModalDataItems, MultiModalDataParser
from vllm.multimodal.processing import (
    BaseDummyInputsBuilder,
    BaseMultiModalProcessor,
    BaseProcessingInfo,
    ProcessorInputs,
    PromptReplacement,
    PromptUpdateDetails,
    TimingContext,
)

from vllm_omni_ext.model_plugins.bagel.images import resize, to_rgb
from vllm_omni_ext.model_plugins.bagel.memory import picture_tokens
from vllm_omni_ext.model_plugins.bagel.requests.parts import PICTURE
from vllm_omni_ext.model_plugins.bagel.sizes import BagelSizes, CheckpointError
from vllm_omni_ext.model_plugins.bagel.stages.files import model_sizes

IMAGE = "image"
VIT = "vit"
"""Key of a picture's `MultiModalKwargsItem`: uint8 `[height, width, 3]` RGB. It is the tensor `PICTURE` of the item,
resized by `BagelSizes.vit_resize`."""

PAD = "<|image_pad|>"
"""Placeholder token: of one picture in a prompt before processing, and of one patch after processing."""

_START, _END = "<|vision_start|>", "<|vision_end|>"
_CHANNELS = (1, 3, 4)


class PictureParser(MultiModalDataParser):
    """Converts pictures to RGB as the reference does, before vLLM's different conversion."""

    def _parse_image_data(self, data: Any) -> Any:
        several = isinstance(data, Sequence)
        pictures = [_upright(item) for item in data] if several else _upright(data)
        return super()._parse_image_data(pictures)


def _upright(item: Any) -> Any:
    return to_rgb(normalize_image(item)) if isinstance(item, Image.Image) else item


class PictureInfo(BaseProcessingInfo):
    """vLLM's processing info for `PictureProcessor`: the checkpoint's sizes, token ids and limits of pictures."""

    @cached_property
    def sizes(self) -> BagelSizes:
        return model_sizes(self.ctx.model_config)

    @cached_property
    def markers(self) -> tuple[int, int, int]:
        """Ids of the start marker, the pad token and the end marker."""
        ids = self.get_tokenizer().get_vocab()
        missing = [token for token in (_START, PAD, _END) if token not in ids]
        if missing:
            raise CheckpointError(f"tokenizer.json: has no token {' or '.join(missing)}")
        return ids[_START], ids[PAD], ids[_END]

    def get_data_parser(self) -> MultiModalDataParser:
        return PictureParser()

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {IMAGE: None}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        side = self.largest_side
        return {IMAGE: picture_tokens(self.sizes, side, side, latents=False)}

    @property
    def largest_side(self) -> int:
        """Side in pixels of the square picture that has the most patches of all pictures."""
        return self.sizes.vae_resize.longest


class PictureDummies(BaseDummyInputsBuilder[PictureInfo]):
    """Creates dummy inputs with the largest pictures, with which vLLM profiles memory."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        return PAD * mm_counts.get(IMAGE, 0)

    def get_dummy_mm_data(
        self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Mapping[str, MultiModalDummyOptions]
    ) -> MultiModalDataDict:
        side, count = self.info.largest_side, mm_counts.get(IMAGE, 0)
        options: Any = mm_options.get(IMAGE)
        return {IMAGE: self._get_dummy_images(width=side, height=side, num_images=count, overrides=options)}


class PictureProcessor(BaseMultiModalProcessor[PictureInfo]):
    """Resizes pictures and replaces each `<|image_pad|>` by the placeholder of a picture.

    In a prompt without `<|image_pad|>`, the pictures are inserted before the text.
    """

    def apply(self, inputs: ProcessorInputs, timing_ctx: TimingContext) -> MultiModalInput:
        count = inputs.mm_data_items.get_all_counts().get(IMAGE, 0)
        prompt = with_pads(inputs.prompt, count, self.info.markers)
        return super().apply(replace(inputs, prompt=prompt), timing_ctx)

    def _call_hf_processor(self, hf_data: Mapping[str, object], hf_kwargs: Mapping[str, object]) -> BatchFeature:
        items: Any = hf_data["images"]
        items = items if isinstance(items, Sequence) else [items]
        pairs = [picture_tensors(picture_of(item), self.info.sizes) for item in items]
        pictures, smaller = zip(*pairs, strict=True)
        return BatchFeature({PICTURE: list(pictures), VIT: list(smaller)})

    def _get_mm_fields_config(
        self, hf_inputs: BatchFeature, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        return {
            PICTURE: MultiModalFieldConfig.batched(IMAGE, keep_on_cpu=True),
            VIT: MultiModalFieldConfig.batched(IMAGE),
        }

    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, Any],
        out_mm_kwargs: MultiModalKwargsItems,
    ) -> Sequence[PromptReplacement]:
        start, pad, end = self.info.markers
        patch = self.info.sizes.vit.patch

        def tokens(item: int) -> PromptUpdateDetails:
            height, width, _ = out_mm_kwargs[IMAGE][item][VIT].data.shape
            patches = (height // patch) * (width // patch)
            return PromptUpdateDetails([start, *[pad] * patches, end], is_embed=_everything)

        return [PromptReplacement(modality=IMAGE, target=[pad], replacement=tokens)]


def with_pads(prompt: Sequence[int], pictures: int, markers: tuple[int, int, int]) -> list[int]:
    """Return a prompt with one pad token for each picture.

    Args:
        prompt: token ids. The two markers around a pad token, which other models use, are removed.
        pictures: number of pictures; without a pad token in the prompt, their pad tokens are inserted at the beginning.
        markers: ids of start marker, pad token and end marker.
    """
    _, pad, _ = markers
    found: list[int] = []
    for token in prompt:
        found.append(token)
        if tuple(found[-3:]) == markers:
            found[-3:] = [pad]
    return found if pad in found else [pad] * pictures + found


def picture_of(item: Any) -> Image.Image:
    """Return a picture of a prompt in RGB.

    Args:
        item: PIL image, or uint8 array or tensor `[height, width, channels]` or `[channels, height, width]`.

    Raises:
        ValueError: the item has another type, dtype or shape.
    """
    if isinstance(item, Image.Image):
        return to_rgb(item)
    numbers = np.asarray(item)
    if numbers.ndim == 3 and numbers.shape[-1] not in _CHANNELS:
        numbers = numbers.transpose(1, 2, 0)
    if numbers.dtype != np.uint8 or numbers.ndim != 3 or numbers.shape[-1] not in _CHANNELS:
        kind = f"{numbers.dtype} {list(numbers.shape)}"
        raise ValueError(f"image: a picture is a PIL image or uint8 numbers [height, width, 3], not {kind}")
    return to_rgb(Image.fromarray(numbers[..., 0] if numbers.shape[-1] == 1 else numbers))


def picture_tensors(picture: Image.Image, sizes: BagelSizes) -> tuple[Tensor, Tensor]:
    """Return the two tensors of an RGB picture, `picture` and `vit`, each uint8 `[height, width, 3]`."""
    resized = resize(picture, sizes.vae_resize)
    return _numbers(resized), _numbers(resize(resized, sizes.vit_resize))


def _numbers(picture: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(picture, dtype=np.uint8))


def _everything(tokens: list[int]) -> Tensor:
    return torch.ones(len(tokens), dtype=torch.bool)
