"""Corrects vLLM for videos with a sound track (`use_audio_in_video`).

The placeholder tokens of such a video and of its sound are interleaved by time. vLLM has three faults with them:

`cache_in_pairs`: the placeholder of the video depends on the length of its sound, but vLLM's processor caches the
placeholder under the video's hash alone. If the cache has the video with another sound, the number of placeholders is
wrong, which ends the engine. If the cache has the sound with another video, the sound is missing when vLLM processes
the video.

`merge_by_modality`: in a step with the last tokens of a sound and the first tokens of a video, vLLM assigns the encoder
outputs of the video to the first of these tokens.

`positions_by_time`: vLLM's M-RoPE positions differ from Transformers' `get_rope_index`. In Qwen2.5-Omni all positions
of the video and its sound differ. In Qwen3-Omni the positions after a video differ if its width or height, in tokens,
exceeds its last time position.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from vllm.multimodal.inputs import MultiModalFeatureSpec

OPTION = "use_audio_in_video"
"""Keyword of the processors. If true, each video of the prompt has a sound track, and the prompt has no other sounds.
"""

VIDEO, SOUND = "video", "audio"
"""Modalities in vLLM's features."""


CHECK = "check_interleaved_audio_video"
"""Name of the function that decides in vLLM's model code whether rows are assigned by modality or in their order."""


class _Pairs(dict[str, list[str]]):
    """Hashes of a prompt's media items by modality; the hash of a video contains that of its sound, and vice versa."""


def cache_in_pairs(processor: Any) -> None:
    """Patch one object, vLLM's multimodal processor, for videos with a sound track.

    The hash of a video then contains the hash of its sound, and vice versa. The processor processes the video and its
    sound both, or takes both from the cache.
    """
    hashes, missing = processor._get_mm_hashes, processor._get_cache_missing_items

    def named(inputs: Any) -> Mapping[str, list[str]]:
        found: Mapping[str, list[str]] = hashes(inputs)
        videos, sounds = found.get(VIDEO, []), found.get(SOUND, [])
        if not videos or not inputs.hf_processor_mm_kwargs.get(OPTION):
            return found
        if len(videos) != len(sounds):  # vLLM refuses this prompt
            return found
        pairs = list(zip(videos, sounds, strict=True))
        return _Pairs({**found, VIDEO: [f"{v}+{s}" for v, s in pairs], SOUND: [f"{s}+{v}" for v, s in pairs]})

    def missing_in_pairs(cache: Any, mm_data_items: Any, mm_hashes: Mapping[str, list[str]]) -> Any:
        return missing(
            cache=_PairedCache(cache, mm_hashes) if isinstance(mm_hashes, _Pairs) else cache,
            mm_data_items=mm_data_items,
            mm_hashes=mm_hashes,
        )

    processor._get_mm_hashes, processor._get_cache_missing_items = named, missing_in_pairs


class _PairedCache:
    """Wraps vLLM's processor cache: a video counts as cached only if its sound is cached too, and vice versa."""

    def __init__(self, cache: Any, hashes: _Pairs) -> None:
        self._cache = cache
        pairs = zip(hashes[VIDEO], hashes[SOUND], strict=True)
        self._other = {one: other for video, sound in pairs for one, other in ((video, sound), (sound, video))}

    def is_cached(self, hashes: list[str]) -> list[bool]:
        """Return for each hash whether its item is cached; for a video or its sound, whether both items are."""
        others = [self._other.get(each, each) for each in hashes]
        both = zip(self._cache.is_cached(hashes), self._cache.is_cached(others), strict=True)
        return [one and other for one, other in both]


def merge_by_modality(module: ModuleType) -> None:
    """Patch vLLM's model module of a thinker for steps with tokens of a video and of a sound.

    In each of these steps, encoder outputs are then assigned to the tokens of their own modality.
    """
    assert hasattr(module, CHECK), module
    setattr(module, CHECK, lambda is_video, is_audio, num_video, num_audio: num_video > 0 and num_audio > 0)


@dataclass(frozen=True, kw_only=True)
class Clock:
    """Numbers that determine the M-RoPE positions of videos with a sound track.

    Attributes:
        per_second: time positions in a second.
        merge: side of a token in patches (`spatial_merge_size`).
        own_marks: the begin and end marks of the sound have positions of their own; False: they have the positions of
            the video's marks.
    """

    per_second: float
    merge: int
    own_marks: bool

    @classmethod
    def of(cls, thinker: Any, *, own_marks: bool) -> Clock:
        """Read `per_second` and `merge` from a checkpoint's `thinker_config`."""
        return cls(
            per_second=thinker.position_id_per_seconds,
            merge=thinker.vision_config.spatial_merge_size,
            own_marks=own_marks,
        )


Features = Sequence[MultiModalFeatureSpec]
Compute = Callable[[list[int], list[MultiModalFeatureSpec]], tuple[torch.Tensor, int]]
"""vLLM's `get_mrope_input_positions` of a model: takes token ids and features of a prompt; returns the M-RoPE positions
[3, n] and the delta that is added to the positions of generated tokens."""


def of_videos(features: Features) -> list[MultiModalFeatureSpec]:
    """Return the features of the videos with a sound track, in the order of the prompt."""
    found = [each for each in features if each.modality == VIDEO and each.mm_position.is_embed is not None]
    return sorted(found, key=lambda each: each.mm_position.offset)


def positions_by_time(
    compute: Compute, tokens: Sequence[int], features: Features, clock: Clock, videos: Features | None = None
) -> tuple[torch.Tensor, int]:
    """Return the M-RoPE positions of a prompt in which videos may have a sound track, as Transformers computes them.

    vLLM's function is called without the features of these videos and of their sounds, so it gives their tokens the
    positions of text. For each video in `videos` and its sound, the positions of text are then replaced by positions by
    time: the first of a token's three positions follows from its time in the video.

    Args:
        compute: vLLM's function.
        tokens: the n token ids of the prompt.
        features: all features of the prompt.
        clock: numbers of the checkpoint that determine positions by time.
        videos: videos with a sound track whose tokens get positions by time; None: all of them.

    Returns:
        Positions [3, n], and the delta that is added to the positions of generated tokens.
    """
    others = [each for each in features if each.mm_position.is_embed is None]
    found, delta = compute(list(tokens), others)
    chosen = of_videos(features) if videos is None else videos
    if not chosen:
        return found, delta
    found = found.clone()
    for video in chosen:
        _place(found, video, clock)
    return found, int(found[:, -1].max()) + 1 - len(tokens)


def _place(positions: torch.Tensor, video: MultiModalFeatureSpec, clock: Clock) -> None:
    """Replace the text positions of one video and its sound by positions by time, and shift all later positions."""
    place, data = video.mm_position, video.data
    assert place.is_embed is not None and data is not None
    start, end = place.offset, place.offset + place.length - 1  # the marks of the sound
    shared = 0 if clock.own_marks else 1
    positions[:, start] -= shared
    first = int(positions[0, start]) + 1
    inside, is_video = positions[:, start + 1 : end], place.is_embed[1:-1].bool()
    frames, height, width = (int(size) for size in data["video_grid_thw"].data)  # type: ignore[union-attr]
    times = torch.arange(frames) * data["second_per_grid_ts"].data * clock.per_second
    sides = torch.arange(height // clock.merge), torch.arange(width // clock.merge)
    inside[:, is_video] = torch.stack(torch.meshgrid(times.long(), *sides, indexing="ij")).reshape(3, -1) + first
    inside[:, ~is_video] = torch.arange(int((~is_video).sum())) + first
    changes = (is_video != is_video[-1]).nonzero()
    last_run = inside[:, int(changes.max()) + 1 if len(changes) else 0 :]
    positions[:, end:] += int(last_run.max()) + 1 - int(positions[0, end])
    positions[:, end + 1 :] -= shared
