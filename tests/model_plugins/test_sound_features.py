"""Sounds are processed, and named in vLLM's caches, by the longest sound of their prompt."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.multimodal.parse import AudioProcessorItems, ImageProcessorItems, MultiModalDataItems

from vllm_omni_ext.model_plugins.qwen3_omni.sound_features import pad_to_longest

HOP = 160
CALLERS = {"audio_kwargs": {"sampling_rate": 16_000}, "do_resize": False}


def inputs(*lengths: int | None) -> Any:
    """Inputs of a processor with sounds of these numbers of samples (None: known by its name only) and an image."""
    sounds = [None if length is None else np.zeros(length, np.float32) for length in lengths]
    items = {"audio": AudioProcessorItems(sounds)} if lengths else {}
    image = ImageProcessorItems([np.zeros((4, 4, 3), np.uint8)])
    return SimpleNamespace(mm_data_items=MultiModalDataItems({**items, "image": image}), mm_uuid_items=None)


def processor() -> Any:
    extractor = SimpleNamespace(feature_extractor=SimpleNamespace(hop_length=HOP))

    def names(given: Any) -> dict[str, list[str]]:
        return {key: [f"{key}{i}" for i in range(len(items))] for key, items in given.mm_data_items.items()}

    made = SimpleNamespace(info=SimpleNamespace(get_hf_processor=lambda: extractor))
    made._get_mm_hashes, made._get_cache_missing_processor_kwargs = names, lambda given, cached: CALLERS
    pad_to_longest(made)
    return made


@pytest.mark.parametrize(
    ("lengths", "names", "padded"),
    [
        ((), None, None),
        ((1600,), ["audio0"], None),
        ((1600, 1601), ["audio0+0", "audio1"], 1760),
        ((1599, 1600), ["audio0", "audio1"], 1600),
        ((480, 4800, None, 320), ["audio0+0", "audio1", "audio2", "audio3+0"], 4800),
    ],
)
def test_sounds_are_padded_to_the_longest_and_shorter_ones_have_names_of_their_own(
    lengths: tuple[int | None, ...], names: list[str] | None, padded: int | None
) -> None:
    given, made = inputs(*lengths), processor()
    expected = {"image": ["image0"]} | ({} if names is None else {"audio": names})
    assert made._get_mm_hashes(given) == expected
    options = made._get_cache_missing_processor_kwargs(given, None)
    if padded is None:
        assert options == CALLERS
    else:
        audio = {"sampling_rate": 16_000, "padding": "max_length", "max_length": padded}
        assert options == {"audio_kwargs": audio, "do_resize": False}


def test_a_name_of_the_client_stays() -> None:
    given = inputs(480, 320, 1600)
    given.mm_uuid_items = {"audio": ["mine", None, None]}
    assert processor()._get_mm_hashes(given)["audio"] == ["audio0", "audio1+0", "audio2"]
