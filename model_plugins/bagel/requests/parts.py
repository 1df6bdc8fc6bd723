"""Converts a rendered prompt, or a text and pictures, to the message parts of a prompt for the stage `dit`.

A part is a `payloads.Text` or a `payloads.Picture`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from PIL import Image

from vllm_omni_ext.errors import RequestFailed
from vllm_omni_ext.model_plugins.bagel.images import resize, to_rgb
from vllm_omni_ext.model_plugins.bagel.requests.payloads import Part, Picture, Text
from vllm_omni_ext.model_plugins.bagel.sizes import ResizeRule
from vllm_omni_ext.model_plugins.bagel.tokens import Tokens

PICTURE = "picture"
"""Key of a picture's `MultiModalKwargsItem`: uint8 [height, width, 3] RGB, resized for the autoencoder."""


def split_prompt(ids: Sequence[int], features: Sequence[Any], tokens: Tokens) -> list[Part]:
    """Split a prompt into its texts and pictures, in order.

    A text is the ids between a start id and an end id. Ids that are not between start and end ids are a text too. A
    start id at the end of the prompt, which begins a reply, is left out.

    Args:
        ids: token ids of the prompt, with the placeholder tokens of each picture.
        features: vLLM's `MultiModalFeatureSpec`s of the prompt.
        tokens: the tokenizer.
    """
    parts: list[Part] = []
    for before, feature in cut_at_pictures(ids, features):
        parts += _texts(before, tokens)
        if feature is not None:
            parts.append(_picture(feature))
    return parts


def cut_at_pictures(ids: Sequence[int], features: Sequence[Any]) -> Iterator[tuple[Sequence[int], Any]]:
    """Yield (ids before a picture, the picture's feature) for each picture, then (ids after the last picture, None)."""
    at = 0
    for feature in sorted(features, key=lambda each: each.mm_position.offset):
        where = feature.mm_position
        yield ids[at : where.offset], feature
        at = where.offset + where.length
    yield ids[at:], None


def _texts(ids: Sequence[int], tokens: Tokens) -> list[Text]:
    found: list[Text] = []
    inside, text = False, list[int]()
    for id_ in ids:
        if id_ not in (tokens.start, tokens.end):
            text.append(id_)
            continue
        if text or (inside and id_ == tokens.end):
            found.append(text_part(text, tokens))
        inside, text = id_ == tokens.start, []
    return [*found, text_part(text, tokens)] if text else found


def text_part(ids: Sequence[int], tokens: Tokens) -> Text:
    """Return the `Text` of token ids, with the start id before them and the end id after them."""
    return Text([tokens.start, *ids, tokens.end])


def _picture(feature: Any) -> Picture:
    if feature.data is None:
        raise RequestFailed("a picture of the request is not in this process: vLLM's cache of pictures has taken it")
    return _as_part(feature.data[PICTURE].data.numpy())


def picture_part(picture: Image.Image, rule: ResizeRule) -> Picture:
    """Return the `Picture` of a PIL image, in RGB and resized by the autoencoder's rule."""
    return _as_part(np.asarray(resize(to_rgb(picture), rule)))


def _as_part(pixels: np.ndarray[Any, Any]) -> Picture:
    height, width, _ = pixels.shape
    return Picture(height, width, np.ascontiguousarray(pixels, np.uint8).tobytes())


def text_ids(parts: Sequence[Part]) -> list[int]:
    """Return the ids of all texts, in order."""
    return [id_ for part in parts if isinstance(part, Text) for id_ in part.ids]
