"""Videos with a sound of their own: their items in vLLM's cache, and their positions."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig
from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe
from vllm.model_executor.models import qwen2_5_omni_thinker, qwen3_omni_moe_thinker
from vllm.multimodal.inputs import PlaceholderRange

from vllm_omni_ext.model_plugins.qwen2_5_omni.tiny.qwen2_5_omni import write_qwen2_5_omni
from vllm_omni_ext.model_plugins.qwen3_omni.runtime import before_images
from vllm_omni_ext.model_plugins.qwen_omni.own_sounds import CHECK, Clock, cache_in_pairs, merge_by_modality, of_videos
from vllm_omni_ext.model_plugins.qwen_omni.own_sounds import positions_by_time as place
from vllm_omni_ext.model_plugins.qwen_omni.requests import position_model

Thinker25 = qwen2_5_omni_thinker.Qwen2_5OmniThinkerForConditionalGeneration
Thinker3 = qwen3_omni_moe_thinker.Qwen3OmniMoeThinkerForConditionalGeneration

# -- vLLM's processor cache -------------------------------------------------------------------------------------


def processor() -> Any:
    """A processor whose items are their own hashes, with vLLM's search for missing items."""

    def missing(cache: Any, mm_data_items: Any, mm_hashes: Any) -> dict[str, list[bool]]:
        return {modality: cache.is_cached(names) for modality, names in mm_hashes.items()}

    made = SimpleNamespace(_get_mm_hashes=lambda inputs: inputs.items, _get_cache_missing_items=missing)
    cache_in_pairs(made)
    return made


def inputs(option: bool, **items: list[str]) -> Any:
    return SimpleNamespace(items=items, hf_processor_mm_kwargs={"use_audio_in_video": True} if option else {})


def test_a_video_and_its_sound_have_the_hashes_of_both() -> None:
    named = processor()._get_mm_hashes
    assert named(inputs(True, image=["i"], video=["v", "w"], audio=["a", "a"])) == {
        "image": ["i"],
        "video": ["v+a", "w+a"],
        "audio": ["a+v", "a+w"],
    }


@pytest.mark.parametrize(
    ("option", "items"),
    [
        (False, {"video": ["v"], "audio": ["a"]}),
        (True, {"video": ["v"], "audio": ["a", "b"]}),  # vLLM refuses this prompt
        (True, {"image": ["i"], "audio": []}),
        (True, {"image": ["i"]}),
    ],
)
def test_other_items_keep_their_hashes(option: bool, items: dict[str, list[str]]) -> None:
    made, given = processor(), inputs(option, **items)
    assert made._get_mm_hashes(given) == items
    cache = SimpleNamespace(is_cached=lambda names: [name == "v" for name in names])
    found = made._get_cache_missing_items(cache=cache, mm_data_items=None, mm_hashes=items)
    assert found == {modality: cache.is_cached(names) for modality, names in items.items()}


@given(held=st.sets(st.sampled_from(["i", "v+a", "w+b", "w+a", "a+v", "b+w", "a+w"])), order=st.permutations("vwvw"))
def test_a_video_and_its_sound_are_processed_both_or_not_at_all(held: set[str], order: list[str]) -> None:
    made, sounds = processor(), [{"v": "a", "w": "b"}[video] for video in order]
    names = made._get_mm_hashes(inputs(True, image=["i"], video=order, audio=sounds))
    cache = SimpleNamespace(is_cached=lambda names: [name in held for name in names])
    found = made._get_cache_missing_items(cache=cache, mm_data_items=None, mm_hashes=names)
    assert found["image"] == ["i" in held]
    assert found["video"] == found["audio"]
    for held_whole, video, sound in zip(found["video"], names["video"], names["audio"], strict=True):
        assert held_whole == (video in held and sound in held)


# -- rows of the encoders ---------------------------------------------------------------------------------------


def test_the_end_of_a_sound_and_the_beginning_of_a_video_are_assigned_by_modality() -> None:
    """A step that has tokens of these modalities; vLLM's own function takes the rows in the order of their items."""
    check = qwen2_5_omni_thinker.check_interleaved_audio_video
    with mock.patch.object(qwen3_omni_moe_thinker, CHECK, check):
        merge_by_modality(qwen3_omni_moe_thinker)
        is_audio = torch.tensor([True, True, False, False])
        own = getattr(qwen3_omni_moe_thinker, CHECK)
        assert not check(~is_audio, is_audio, 2, 2) and own(~is_audio, is_audio, 2, 2)
        assert not own(~is_audio, is_audio & False, 2, 0) and not own(is_audio & False, is_audio, 0, 2)


# -- positions --------------------------------------------------------------------------------------------------

MERGE = 2
SIZES = (2, 4, 8, 26)
"""Patches along a side of a video."""


@pytest.fixture(scope="module")
def config3(tiny: Path) -> Any:
    return AutoConfig.from_pretrained(tiny)


@pytest.fixture(scope="module")
def config25(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoConfig.from_pretrained(write_qwen2_5_omni(tmp_path_factory.mktemp("qwen2_5") / "model"))


def ids_of(config: Any, suffix: str) -> Any:
    """The ids of media and their marks in a thinker's config, and the positions in a second."""
    media = {name: getattr(config, f"{name}_token_{suffix}") for name in ("audio", "video", "image")}
    ends = [f"{name}_{end}" for name in ("vision", "audio") for end in ("start", "end")]
    marks = {name: getattr(config, f"{name}_token_id") for name in ends}
    return SimpleNamespace(**media, **marks, per_second=config.position_id_per_seconds)


def conversation(rng: random.Random, thinker: Any, rows_of: Any, chunk: int | None) -> tuple[list[int], list[Any], Any]:
    """Ids, vLLM's features, and the arguments of Transformers for videos with sounds, images and texts.

    Args:
        rows_of: number of rows of a sound, by its frames.
        chunk: positions after which video and sound alternate; None: by single positions.
    """
    audio, video, image = thinker.audio, thinker.video, thinker.image
    ids, features, sounds, videos, images = [7] * rng.randint(1, 5), [], [], [], []
    for _ in range(rng.randint(1, 4)):
        if rng.random() < 0.3:
            grid = torch.tensor([1, MERGE * rng.randint(1, 9), MERGE * rng.randint(1, 9)])
            count = int(grid.prod()) // MERGE**2
            span = PlaceholderRange(offset=len(ids) + 1, length=count)
            features.append(item("image", span, image_grid_thw=grid))
            ids += [thinker.vision_start, *[image] * count, thinker.vision_end]
            images.append(grid)
        else:
            grid = torch.tensor([rng.randint(1, 4), MERGE * rng.choice(SIZES), MERGE * rng.choice(SIZES)])
            frames, seconds = rng.choice((20, 31, 80, 100, 250, 420)), torch.tensor(2.0)
            times = (torch.arange(grid[0]) * seconds * thinker.per_second).long()
            order = [(int(time), 0, video) for time in times for _ in range(int(grid[1:].prod()) // MERGE**2)]
            order += [(time, 1, audio) for time in range(rows_of(frames))]
            inside = [kind for *_, kind in sorted(order, key=lambda each: (each[0] // (chunk or 1), each[1], each[0]))]
            start = len(ids) + 1
            ids += [thinker.vision_start, thinker.audio_start, *inside, thinker.audio_end, thinker.vision_end]
            region = torch.tensor(ids[start : start + len(inside) + 2])
            span = PlaceholderRange(offset=start, length=len(region), is_embed=region == video)
            values = {"video_grid_thw": grid, "second_per_grid_ts": seconds, "use_audio_in_video": torch.tensor(True)}
            features.append(item("video", span, **values))
            span = PlaceholderRange(offset=start, length=len(region), is_embed=region == audio)
            features.append(item("audio", span, audio_feature_lengths=torch.tensor(frames)))
            videos.append(grid)
            sounds.append(frames)
        ids += [7] * rng.randint(0, 4)
    ids += [7]
    given = {
        "input_ids": torch.tensor([ids]),
        "image_grid_thw": torch.stack(images) if images else None,
        "video_grid_thw": torch.stack(videos) if videos else None,
        "attention_mask": torch.ones(1, len(ids), dtype=torch.long),
        "audio_seqlens": torch.tensor(sounds),
        "second_per_grids": torch.full((len(videos),), 2.0),
    }
    return ids, features, given


def item(modality: str, span: PlaceholderRange, **data: torch.Tensor) -> Any:
    values = {name: SimpleNamespace(data=value) for name, value in data.items()}
    return SimpleNamespace(modality=modality, mm_position=span, data=values, identifier=modality)


def transformers_positions(model: type, config: Any, **given: Any) -> torch.Tensor:
    """`get_rope_index` of a class without its weights: the positions [3, n]."""
    made = model.__new__(model)
    torch.nn.Module.__init__(made)
    made.config, made.spatial_merge_size = config, MERGE
    positions, _ = model.get_rope_index(made, **given)
    return positions[:, 0].long()


@pytest.mark.parametrize("seed", range(30))
def test_positions_are_those_of_transformers_in_qwen3_omni(seed: int, config3: Any) -> None:
    config = config3.thinker_config
    thinker = ids_of(config, "id")
    rows = lambda frames: int(  # noqa: E731
        modeling_qwen3_omni_moe._get_feat_extract_output_lengths(torch.tensor(frames), config.audio_config.n_window)
    )
    ids, features, given = conversation(random.Random(seed), thinker, rows, None)
    compute = position_model(Thinker3, config3).get_mrope_input_positions
    clock = Clock.of(config, own_marks=True)
    model = modeling_qwen3_omni_moe.Qwen3OmniMoePreTrainedModelForConditionalGeneration
    wanted = transformers_positions(model, config, use_audio_in_video=True, **given)
    found, delta = place(compute, ids, features, clock)
    assert torch.equal(found, wanted) and delta == int(found[0, -1]) + 1 - len(ids)
    if given["video_grid_thw"] is None and given["image_grid_thw"] is None:
        return
    spoken, _ = place(compute, ids, features, clock, before_images(features))
    wanted = transformers_positions(model, config, use_audio_in_video=False, **given)
    assert torch.equal(spoken, wanted), "of the talker, which Transformers calls without the option"


@pytest.mark.parametrize("seed", range(30))
def test_positions_are_those_of_transformers_in_qwen2_5_omni(seed: int, config25: Any) -> None:
    config = config25.thinker_config
    thinker = ids_of(config, "index")
    chunk = int(config.position_id_per_seconds * config.seconds_per_chunk)
    rows = lambda frames: ((frames - 1) // 2 + 1 - 2) // 2 + 1  # noqa: E731
    ids, features, given = conversation(random.Random(seed), thinker, rows, chunk)
    compute = position_model(Thinker25, config25).get_mrope_input_positions
    model = modeling_qwen2_5_omni.Qwen2_5OmniPreTrainedModelForConditionalGeneration
    found, _ = place(compute, ids, features, Clock.of(config, own_marks=False))
    if of_videos(features) or given["image_grid_thw"] is not None:
        wanted = transformers_positions(model, config, use_audio_in_video=True, **given)
        assert torch.equal(found, wanted)
