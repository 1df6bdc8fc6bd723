"""Sounds are divided into blocks of the encoder that have the same names, rows and positions in each longer sound."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeAudioEncoderConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeAudioEncoder
from vllm.model_executor.models.qwen3_omni_moe_thinker import (
    Qwen3OmniMoeThinkerForConditionalGeneration,
    _get_feat_extract_output_lengths,
)
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
    PlaceholderRange,
)

from vllm_omni_ext.model_plugins.qwen3_omni.sound_blocks import (
    CHUNK_FRAMES,
    CHUNK_ROWS,
    FEATURES,
    LENGTH,
    MASK,
    SOUND,
    beginning,
    block_frames,
    divided,
    frames_of,
    joined,
    named_by_padding,
    rows_of_chunk,
)
from vllm_omni_ext.model_plugins.qwen3_omni.thinker_worker import LongestChunk
from vllm_omni_ext.model_plugins.qwen_omni.requests import position_model

BLOCK, BLOCK_ROWS = 200, 26
TEXT, PAD, END = 1, 2, 3
BINS = 4
FRAMES = st.integers(30, 650)


def rows_of(frames: int) -> int:
    return int(_get_feat_extract_output_lengths(torch.tensor(frames)))


def sound(values: torch.Tensor, offset: int, name: str = "name", **more: Any) -> MultiModalFeatureSpec:
    """A sound with features [bins, frames] as vLLM's processor returns it."""
    frames = values.shape[1]
    batched = MultiModalBatchedField(keep_on_cpu=True)
    data = {
        FEATURES: MultiModalFieldElem(values, MultiModalFlatField(slices=[], dim=1)),
        MASK: MultiModalFieldElem(torch.ones(frames), batched),
        LENGTH: MultiModalFieldElem(torch.tensor(frames), batched),
    }
    given = {"identifier": name, "mm_hash": name, "data": MultiModalKwargsItem(data), **more}
    place = PlaceholderRange(offset=offset, length=rows_of(frames))
    return MultiModalFeatureSpec(modality=SOUND, **{"mm_position": place, **given})


def noise(frames: int, seed: int = 0) -> torch.Tensor:
    """Features whose beginning does not depend on the number of frames."""
    return torch.randn(700, BINS, generator=torch.Generator().manual_seed(seed))[:frames].T


def prompt(lengths: list[int], texts: list[int]) -> tuple[list[int], list[MultiModalFeatureSpec]]:
    """A prompt with texts and sounds in turn, each sound between its marks."""
    ids: list[int] = []
    features = []
    for seed, (frames, text) in enumerate(zip(lengths, texts, strict=True)):
        ids += [TEXT] * text
        features.append(sound(noise(frames, seed), len(ids), f"sound {seed} of {frames}"))
        ids += [PAD] * rows_of(frames) + [END]
    return [*ids, TEXT, TEXT], features


def names(features: list[MultiModalFeatureSpec]) -> list[tuple[str, int]]:
    return [(each.identifier, each.mm_position.offset) for each in features]


@given(sounds=st.lists(st.tuples(FRAMES, st.integers(1, 5)), min_size=1, max_size=3))
def test_blocks_cover_a_sound_without_a_gap(sounds: list[tuple[int, int]]) -> None:
    _, features = prompt(*map(list, zip(*sounds, strict=True)))  # type: ignore[arg-type]
    blocks = divided(features, BLOCK)
    for whole in features:
        place = whole.mm_position
        own = [b for b in blocks if place.offset <= b.mm_position.offset < place.offset + place.length]
        assert [frames_of(each) for each in own[:-1]] == [BLOCK] * (len(own) - 1)
        assert torch.equal(torch.cat([each.data[FEATURES].data for each in own], 1), whole.data[FEATURES].data)  # type: ignore[index, arg-type]
        assert [rows_of(frames_of(each)) for each in own] == [each.mm_position.length for each in own]
        edges = [place.offset, *(each.mm_position.offset + each.mm_position.length for each in own)]
        assert edges[:-1] == [each.mm_position.offset for each in own]
        assert edges[-1] == place.offset + place.length
        assert all(each.data[MASK].data.shape == (frames_of(each),) for each in own)  # type: ignore[index, union-attr]
    assert all(one.mm_position.offset < other.mm_position.offset for one, other in pairwise(blocks))


@given(sounds=st.lists(st.tuples(FRAMES, st.integers(1, 5)), min_size=1, max_size=3), cut=st.integers(0, 600))
def test_the_beginning_of_a_longer_sound_has_the_same_tokens_and_names(sounds: list[tuple[int, int]], cut: int) -> None:
    lengths, texts = map(list, zip(*sounds, strict=True))
    ids, features = prompt(lengths, texts)
    shorter = max(30, lengths[-1] - cut)
    head, head_features = beginning(*prompt([*lengths[:-1], shorter], texts), BLOCK)
    stop = len(head) - 1
    assert head[-1] == END
    if shorter >= BLOCK:
        assert head[:stop] == ids[:stop] and stop == features[-1].mm_position.offset + shorter // BLOCK * BLOCK_ROWS
        assert names(head_features) == [each for each in names(divided(features, BLOCK)) if each[1] < stop]
    assert sum(each.mm_position.length for each in head_features) == head.count(PAD)


@given(sounds=st.lists(st.tuples(FRAMES, st.integers(1, 5)), min_size=1, max_size=3))
def test_positions_of_blocks_are_those_of_the_sound(sounds: list[tuple[int, int]]) -> None:
    vision, thinker = SimpleNamespace(spatial_merge_size=2), SimpleNamespace(position_id_per_seconds=13)
    thinker.vision_config = vision
    model = position_model(Qwen3OmniMoeThinkerForConditionalGeneration, SimpleNamespace(thinker_config=thinker))
    ids, features = prompt(*map(list, zip(*sounds, strict=True)))  # type: ignore[arg-type]
    expected, delta = model.get_mrope_input_positions(ids, features)
    found, same = model.get_mrope_input_positions(ids, joined(divided(features, BLOCK)))
    assert torch.equal(found, expected) and same == delta
    head, whole = beginning(ids, features, BLOCK)
    found, _ = model.get_mrope_input_positions(head, joined(whole))
    assert torch.equal(found[:, :-1], expected[:, : len(head) - 1])


def test_a_sound_of_an_earlier_turn_is_divided_without_a_copy() -> None:
    features = noise(450, seed=7)
    first, again = (divided([sound(features, offset, "earlier")], BLOCK) for offset in (3, 9))
    assert [each.mm_hash for each in again] == [each.mm_hash for each in first]
    for one, other in zip(first, again, strict=True):
        assert one.data is not None and other.data is not None
        assert torch.equal(one.data[FEATURES].data, other.data[FEATURES].data)
        assert np.shares_memory(other.data[FEATURES].data, features)
    longer = divided([sound(noise(650, seed=7), 3, "earlier")], BLOCK)  # a client may give two sounds one name
    assert len(longer) == 4 and longer[0].mm_hash == first[0].mm_hash


def test_changed_features_change_the_name_of_their_block_only() -> None:
    louder = noise(450)
    louder[:, 250] += 1
    one, other = (divided([sound(noise(450), 3)], BLOCK), divided([sound(louder, 3, "louder")], BLOCK))
    same = [a.identifier == b.identifier for a, b in zip(one, other, strict=True)]
    assert same == [True, False, True]


def test_blocks_have_the_prefix_of_an_adapter() -> None:
    plain, adapted = (divided([sound(noise(450), 3, identifier=name)], BLOCK) for name in ("name", "lora:name"))
    assert [each.identifier for each in adapted] == [f"lora:{each.identifier}" for each in plain]


@pytest.mark.parametrize(
    "feature",
    [
        sound(noise(BLOCK - 1), 3),
        sound(noise(450), 3, data=None),
        sound(noise(450), 3, mm_hash=None),
        sound(noise(450), 3, mm_position=PlaceholderRange(offset=3, length=90, is_embed=torch.ones(90).bool())),
    ],
    ids=["shorter than a block", "without data", "without a hash", "of a video"],
)
def test_other_sounds_stay_whole(feature: MultiModalFeatureSpec) -> None:
    assert divided([feature], BLOCK) == [feature]


@pytest.mark.parametrize(
    ("n_window", "n_window_infer", "frames"), [(50, 800, 800), (50, 250, 200), (50, 60, None), (100, 800, None)]
)
def test_a_block_has_whole_chunks(n_window: int, n_window_infer: int, frames: int | None) -> None:
    assert block_frames(SimpleNamespace(n_window=n_window, n_window_infer=n_window_infer)) == frames


class Tower(torch.nn.Module):
    """An encoder whose rows are the length of the longest chunk of the call."""

    def forward(self, features: torch.Tensor, *, feature_lens: torch.Tensor, aftercnn_lens: torch.Tensor) -> Any:
        assert features.shape[1] == feature_lens.sum() and len(feature_lens) == len(aftercnn_lens)
        longest = min(int(feature_lens.max()), CHUNK_FRAMES)
        return torch.full((int(aftercnn_lens.sum()), 2), float(longest))


@pytest.mark.parametrize(
    ("added", "frames", "longest"),
    [(0, [40, 60], 60), (100, [40, 60], 100), (70, [40, 60], 70), (1, [40], 40), (0, [40, 150], 100)],
)
def test_short_clips_are_padded_to_an_added_chunk(added: int, frames: list[int], longest: int) -> None:
    tower = Tower()
    chunk = LongestChunk(tower)
    lens = torch.tensor(frames)
    rows = _get_feat_extract_output_lengths(lens)
    for chunk.frames in (90, added):
        found = tower(torch.zeros(BINS, sum(frames)), feature_lens=lens, aftercnn_lens=rows)
        assert found.shape == (int(rows.sum()), 2)
    assert set(found.flatten().tolist()) == {longest}


def test_rows_of_a_chunk_are_those_of_vllms_model_code() -> None:
    assert [rows_of_chunk(frames) for frames in range(CHUNK_FRAMES + 1)] == [0, *map(rows_of, range(1, 101))]
    assert rows_of_chunk(CHUNK_FRAMES) == CHUNK_ROWS


@pytest.mark.parametrize(
    ("frames", "names"),
    [
        ([40], ["name0"]),
        ([40, 40], ["name0", "name1"]),
        ([40, 60], ["name0+60", "name1"]),
        ([60, 130, 40], ["name0+100", "name1", "name2+100"]),
        ([130, 220], ["name0", "name1"]),
    ],
)
def test_sounds_are_named_by_the_length_to_which_the_encoder_pads_them(frames: list[int], names: list[str]) -> None:
    """The encoder cache and the prefix cache keep the rows of a short sound for each length."""
    picture = MultiModalFeatureSpec(None, "image", "picture", PlaceholderRange(offset=0, length=9), mm_hash="picture")
    sounds = [sound(noise(count), 10 + 200 * i, f"name{i}") for i, count in enumerate(frames)]
    found = named_by_padding([picture, *sounds])
    assert [each.identifier for each in found] == ["picture", *names]
    assert [each.mm_hash for each in found] == ["picture", *(each.mm_hash for each in sounds)], "sent once"
    assert named_by_padding([]) == []


class Rows(torch.nn.Module):
    """Transformers' encoder with the arguments and the output of vLLM's."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 64}
        config = Qwen3OmniMoeAudioEncoderConfig(
            **sizes, num_mel_bins=16, downsample_hidden_size=8, output_dim=32, n_window=50, n_window_infer=BLOCK
        )
        torch.manual_seed(0)
        self.inner = Qwen3OmniMoeAudioEncoder._from_config(config).eval()
        for each in self.inner.parameters():  # also the biases of the convolutions
            torch.nn.init.normal_(each, std=0.3)

    def forward(self, features: torch.Tensor, *, feature_lens: torch.Tensor, aftercnn_lens: torch.Tensor) -> Any:
        return self.inner(features, feature_lens=feature_lens, aftercnn_lens=aftercnn_lens).last_hidden_state


@torch.inference_mode()
@pytest.mark.parametrize("sizes", [[BLOCK, BLOCK, 30], [30, 70], [70, 30], [40, 60, 250]], ids=str)
def test_rows_of_sounds_that_are_encoded_apart_are_those_of_one_call(sizes: list[int]) -> None:
    tower = Rows()
    chunk = LongestChunk(tower)
    features = torch.randn(16, sum(sizes))

    def encoded(values: torch.Tensor, lens: list[int]) -> torch.Tensor:
        frames = torch.tensor(lens)
        rows: torch.Tensor = tower(values, feature_lens=frames, aftercnn_lens=_get_feat_extract_output_lengths(frames))
        return rows

    together, parts = encoded(features, sizes), features.split(sizes, 1)
    apart = [encoded(each, [each.shape[1]]) for each in parts]
    assert not torch.allclose(torch.cat(apart), together, atol=1e-3), "padding has influence"
    chunk.frames = min(max(sizes), CHUNK_FRAMES)
    apart = [encoded(each, [each.shape[1]]) for each in parts]
    torch.testing.assert_close(torch.cat(apart), together, atol=1e-5, rtol=1e-4)
