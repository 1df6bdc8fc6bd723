"""Divides the sounds of a prompt into blocks that the audio encoder computes independently of each other.

A block is a window of the encoder's attention (`n_window_infer`, 8 s in the released checkpoint). No row of a block,
i.e. the encoder's output for one prompt token, depends on later features. Each block becomes a media item whose
identifier is a hash of its features. vLLM's encoder cache and prefix cache then contain the block for every prompt that
begins with the same features.

Features, not samples, are hashed: Whisper's features are clipped at 80 dB below the loudest frame of the whole sound.
A louder frame that follows can change the features of earlier blocks, which are then computed again.

Lengths of sounds, blocks and chunks are in frames of the features (10 ms).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any

import torch
from cachetools import LRUCache
from vllm.multimodal.inputs import (
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)

from vllm_omni_ext.model_plugins.qwen_omni.own_sounds import SOUND

FRAME_MS = 10
CHUNK_FRAMES, CHUNK_ROWS = 100, 13
"""Number of frames in a chunk, which the encoder's convolutions process separately, and number of rows that a chunk
becomes. vLLM's model code has both as constants."""

FEATURES, MASK, LENGTH = "input_audio_features", "feature_attention_mask", "audio_feature_lengths"
"""Keys of a sound's `MultiModalKwargsItem`: features [mel bins, frames], their mask [frames], and the number of frames.
"""

_NAMES: LRUCache[tuple[str, int, int], list[str]] = LRUCache(4096)
"""(hash of a sound, frames of a block, frames of the sound) -> hashes of the sound's blocks.

The sounds of a conversation's earlier turns are divided again in each turn. With known hashes, the data of a block are
a view of the sound's features, not a copy: the engine has most of these blocks, which are therefore not sent.
"""


def block_frames(config: Any) -> int | None:
    """Return the number of frames in a block; None if the encoder's chunks differ from those of vLLM's model code.

    Args:
        config: the `audio_config` of a checkpoint.
    """
    if 2 * config.n_window != CHUNK_FRAMES or config.n_window_infer < CHUNK_FRAMES:
        return None
    return int(config.n_window_infer) // CHUNK_FRAMES * CHUNK_FRAMES


def frames_of(feature: MultiModalFeatureSpec) -> int:
    """Return the number of frames of a sound whose data are present."""
    assert feature.data is not None
    return int(feature.data[LENGTH].data)  # type: ignore[arg-type]


def is_sound(feature: MultiModalFeatureSpec) -> bool:
    """Return whether a feature is a sound whose data are present."""
    return feature.modality == SOUND and feature.data is not None


def longest_chunk(features: Iterable[MultiModalFeatureSpec]) -> int:
    """Return the number of frames of the longest chunk of the sounds whose data are present; 0 without one."""
    return max((min(frames_of(each), CHUNK_FRAMES) for each in features if is_sound(each)), default=0)


def rows_of_chunk(frames: int) -> int:
    """Return the rows of a chunk of `frames` frames: each of the encoder's three convolutions halves the length."""
    return -(-frames // 8)


def named_by_padding(features: Sequence[MultiModalFeatureSpec]) -> list[MultiModalFeatureSpec]:
    """Append the length to which the encoder pads a sound to the sound's identifier, its key in vLLM's caches.

    The encoder pads the last chunk of a sound to the longest chunk of the prompt's sounds. The rows of a sound without
    a whole chunk therefore differ from prompt to prompt. A sound that is not padded keeps its identifier.

    Args:
        features: all features of a prompt.
    """
    longest = longest_chunk(features)
    return [
        replace(each, identifier=f"{each.identifier}+{longest}")
        if is_sound(each) and frames_of(each) < longest
        else each
        for each in features
    ]


def divided(features: Sequence[MultiModalFeatureSpec], block: int) -> list[MultiModalFeatureSpec]:
    """Return the features of a prompt, with each sound of `block` frames or more divided into blocks of `block` frames.

    The last block of a sound may be shorter. If a video of the prompt has a sound track, no sound of the prompt is
    divided, because vLLM assigns sounds to videos by their order.
    """
    if any(each.modality == SOUND and each.mm_position.is_embed is not None for each in features):
        return list(features)
    found: list[MultiModalFeatureSpec] = []
    for feature in features:
        known = is_sound(feature) and feature.mm_hash is not None
        found += _blocks(feature, block) if known and frames_of(feature) >= block else [feature]
    return found


def _blocks(feature: MultiModalFeatureSpec, block: int) -> list[MultiModalFeatureSpec]:
    data, place, frames = feature.data, feature.mm_position, frames_of(feature)
    assert data is not None and feature.mm_hash is not None
    adapter = feature.identifier.removesuffix(feature.mm_hash)  # vLLM's prefix, if adapters change the encoder
    rows = block // CHUNK_FRAMES * CHUNK_ROWS
    key = feature.mm_hash, block, frames
    known = _NAMES.get(key)
    found, names = [], []
    for index, first in enumerate(range(0, frames, block)):
        count, offset = min(block, frames - first), index * rows
        part = _part(data, first, count, copied=known is None)
        name = known[index] if known is not None else sha256(part[FEATURES].data.numpy()).hexdigest()  # type: ignore[union-attr]
        names.append(name)
        found.append(
            MultiModalFeatureSpec(
                data=part,
                modality=SOUND,
                identifier=adapter + name,
                mm_position=PlaceholderRange(
                    offset=place.offset + offset, length=rows if count == block else place.length - offset
                ),
                mm_hash=name,
            )
        )
    _NAMES[key] = names
    return found


def _part(data: MultiModalKwargsItem, first: int, count: int, *, copied: bool) -> MultiModalKwargsItem:
    """Return the data of the frames [first, first + count) of a sound.

    Args:
        data: the sound's data.
        copied: the features are a contiguous copy; False: they are a view.
    """
    stop = first + count

    def features(values: torch.Tensor) -> torch.Tensor:
        part = values.numpy()[:, first:stop]
        # numpy: torch copies in several threads, whose start takes 100 times as long on a busy machine.
        return torch.from_numpy(part.copy() if copied else part)

    cut = {
        FEATURES: features,
        MASK: lambda values: values[first:stop],
        LENGTH: lambda values: torch.full_like(values, count),
    }
    return MultiModalKwargsItem(
        {key: MultiModalFieldElem(data=cut[key](elem.data), field=elem.field) for key, elem in data.items()}
    )


def beginning(
    prompt: Sequence[int], features: Sequence[MultiModalFeatureSpec], block: int
) -> tuple[list[int], list[MultiModalFeatureSpec]]:
    """Return (token ids, features) of a prompt's beginning that can be computed before its last sound is complete.

    The beginning ends with the last whole block of the last sound. The token that follows the sound is appended; a
    later, longer prompt does not reuse that token but computes its own. Without a sound, the whole prompt is returned.

    Args:
        block: number of frames in a block.
    """
    blocks = divided(features, block)
    last = next((each for each in reversed(features) if each.modality == SOUND), None)
    if last is None:
        return list(prompt), blocks
    end = last.mm_position.offset + last.mm_position.length
    whole = [each for each in blocks if each.mm_position.offset < end]
    if whole[-1].modality == SOUND and len(blocks) > len(features) and frames_of(whole[-1]) < block:
        stop = whole.pop().mm_position.offset
    else:
        stop = end
    return [*prompt[:stop], *prompt[end : end + 1]], whole


def joined(features: Sequence[MultiModalFeatureSpec]) -> list[MultiModalFeatureSpec]:
    """Return features in which adjacent blocks are merged into one sound, whose only data is the number of frames."""
    found: list[MultiModalFeatureSpec] = []
    for feature in features:
        last = found[-1] if found else None
        found.append(feature)
        if last is None or not _adjacent(last, feature):
            continue
        assert last.data is not None and feature.data is not None
        before, after, elem = last.mm_position, feature.mm_position, last.data[LENGTH]
        total = MultiModalFieldElem(data=elem.data + feature.data[LENGTH].data, field=elem.field)  # type: ignore[operator]
        found[-2:] = [
            MultiModalFeatureSpec(
                data=MultiModalKwargsItem({LENGTH: total}),
                modality=SOUND,
                identifier=last.identifier,
                mm_position=PlaceholderRange(offset=before.offset, length=before.length + after.length),
            )
        ]
    return found


def _adjacent(one: MultiModalFeatureSpec, other: MultiModalFeatureSpec) -> bool:
    place, after = one.mm_position, other.mm_position
    return (
        one.modality == other.modality == SOUND
        and place.is_embed is None
        and after.is_embed is None
        and place.offset + place.length == after.offset
    )
