"""Patches vLLM's multimodal processor, so that a sound's features do not depend on the processor cache.

Transformers calls its processor with all sounds of a prompt, and pads their samples with zeros to the longest sound.
The window of a shorter sound's last frame then contains zeros, the window of the longest sound's last frame contains
the sound's mirrored samples. vLLM calls Transformers' processor only with the sounds that the processor cache lacks, so
the last frame of a sound would depend on the cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.multimodal.parse import AudioProcessorItems

from vllm_omni_ext.model_plugins.qwen_omni.own_sounds import SOUND

OPTIONS = "audio_kwargs"
"""Keyword of Transformers' processor: options of the feature extractor."""


def pad_to_longest(processor: Any) -> None:
    """Patch one object, vLLM's multimodal processor, to pad the samples of sounds to the longest sound of the prompt.

    A sound that is shorter than the longest one of its prompt has a separate hash in the caches. A client's own id of a
    sound (vLLM's `uuid`) stays unchanged, so that a later prompt can refer to the sound by its id alone.
    """
    hop = int(processor.info.get_hf_processor().feature_extractor.hop_length)
    hashes, missing = processor._get_mm_hashes, processor._get_cache_missing_processor_kwargs

    def named(inputs: Any) -> Mapping[str, list[str]]:
        found: Mapping[str, list[str]] = hashes(inputs)
        frames = _frames(inputs, hop)
        if len(frames) < 2:
            return found
        given = (inputs.mm_uuid_items or {}).get(SOUND) or [None] * len(frames)
        names = [
            f"{name}+0" if 0 < own < max(frames) and uuid is None else name
            for name, own, uuid in zip(found[SOUND], frames, given, strict=True)
        ]
        return {**found, SOUND: names}

    def padded(inputs: Any, cached: Any) -> Mapping[str, Any]:
        options: Mapping[str, Any] = missing(inputs, cached)
        frames = _frames(inputs, hop)
        if len(frames) < 2:
            return options
        length = {"padding": "max_length", "max_length": max(frames) * hop}
        return {**options, OPTIONS: {**options.get(OPTIONS, {}), **length}}

    processor._get_mm_hashes, processor._get_cache_missing_processor_kwargs = named, padded


def _frames(inputs: Any, hop: int) -> list[int]:
    """Return the number of feature frames of each sound, rounded up as in vLLM; 0 for a sound without samples.

    Args:
        inputs: vLLM's inputs of a call of the multimodal processor.
        hop: samples between two frames.
    """
    sounds = inputs.mm_data_items.get(SOUND)
    if not isinstance(sounds, AudioProcessorItems):
        return []
    return [-(-sounds.get_audio_length(i) // hop) if sounds.get(i) is not None else 0 for i in range(len(sounds))]
