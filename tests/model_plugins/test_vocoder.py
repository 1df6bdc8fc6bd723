"""The streaming vocoder against Transformers' unchunked decode of the same weights."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.examples import examples
from tests.support.vocoder_reference import (
    check_equal,
    expected,
    random_codes,
    reference,
    small_config,
    vocoder_like,
)
from vllm_omni_ext.model_plugins.qwen3_omni.vocoder import Vocoder

SMALL = reference(small_config())
RELEASED_RATES = {"upsample_rates": (8, 5, 4, 3), "upsampling_ratios": (2, 2), "decoder_dim": 64}


def stream(vocoder: Vocoder, codes: Tensor, schedule: Iterable[int]) -> Tensor:
    """Decode `codes` in chunks of the scheduled sizes (the schedule is repeated), checking the count at each step."""
    state = vocoder.new_state()
    pieces, begin = [], 0
    for size in itertools.cycle(schedule):
        chunk = codes[begin : begin + size]
        begin += len(chunk)
        last = begin == len(codes)
        pieces += vocoder.decode([chunk], [state], [last])
        assert state.frames == begin
        assert state.samples == vocoder.samples_after(begin) == sum(len(p) for p in pieces)
        if last:
            return torch.cat(pieces)
    raise AssertionError("the schedule is empty")


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"upsampling_ratios": (), "upsample_rates": (3, 2)},
        {"upsampling_ratios": (), "upsample_rates": (1, 2, 2)},
        {"upsampling_ratios": (3,), "upsample_rates": (2,)},
        {"sliding_window": 1},
        {"sliding_window": 2},
        {"sliding_window": 72},
        {"sliding_window": 500},
        {"num_key_value_heads": 4, "attention_bias": True},
    ],
    ids=str,
)
def test_any_shape_of_the_network_equals_unchunked(changes: dict[str, object]) -> None:
    model = reference(small_config(**changes), seed=3)
    for frames, schedule in ((30, (1, 7)), (30, (1,)), (100, (4, 25)), (5, (2,))):
        codes = random_codes(model.config, frames, seed=frames)
        check_equal(stream(vocoder_like(model), codes, schedule), expected(model, codes))


@pytest.mark.slow
def test_the_released_rates() -> None:
    model = reference(small_config(**RELEASED_RATES), seed=5)
    vocoder = vocoder_like(model)
    assert (vocoder.total_upsample, vocoder.lookahead_samples) == (1920, 555)
    codes = random_codes(model.config, 40, seed=2)
    for schedule in ((1,), (4, 25), (100,)):
        check_equal(stream(vocoder, codes, schedule), expected(model, codes))


@settings(max_examples=examples(30), deadline=None)
@given(data=st.data())
def test_streams_of_any_lengths_in_one_call_equal_unchunked(data: st.DataObject) -> None:
    """Several streams, each with its own random schedule (empty chunks too), in one call a round."""
    vocoder = vocoder_like(SMALL, max_frames_per_pass=data.draw(st.integers(1, 40)))
    schedules = data.draw(st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=6), min_size=1, max_size=6))
    codes = [random_codes(SMALL.config, sum(s), seed=i) for i, s in enumerate(schedules)]
    states = [vocoder.new_state() for _ in schedules]
    pieces: list[list[Tensor]] = [[] for _ in schedules]
    for step in range(max(map(len, schedules))):
        live = [i for i, s in enumerate(schedules) if step < len(s)]
        chunks = [codes[i][states[i].frames : states[i].frames + schedules[i][step]] for i in live]
        last = [step == len(schedules[i]) - 1 for i in live]
        for i, wave in zip(live, vocoder.decode(chunks, [states[i] for i in live], last), strict=True):
            pieces[i].append(wave)
    for i, waves in enumerate(pieces):
        wanted = expected(SMALL, codes[i]) if len(codes[i]) else torch.empty(0)
        check_equal(torch.cat(waves), wanted)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Streams, frames and groups of each pass."""
    found, run = list[tuple[int, ...]](), Vocoder._pass
    monkeypatch.setattr(Vocoder, "_pass", lambda self, c, *rest: found.append(tuple(c.shape)) or run(self, c, *rest))
    return found


def test_equal_chunks_run_as_one_batch(passes: list[tuple[int, ...]]) -> None:
    vocoder = vocoder_like(SMALL, max_frames_per_pass=1000)
    codes = [random_codes(SMALL.config, 20 + 5, seed=i) for i in range(6)]
    states = [vocoder.new_state() for _ in codes]
    vocoder.decode([c[:20] for c in codes[:5]], states[:5], [False] * 5)
    vocoder.decode([codes[5][:3]], states[5:], [False])
    passes.clear()
    waves = vocoder.decode([c[20:] for c in codes[:5]] + [codes[5][3:8]], states, [True] * 6)
    assert passes == [(6, 5, 4)], "streams at different positions share a batch"
    for i, wave in enumerate(waves[:5]):
        check_equal(wave, expected(SMALL, codes[i])[vocoder.samples_after(20) :])


def test_no_pass_exceeds_its_bound(passes: list[tuple[int, ...]]) -> None:
    vocoder = vocoder_like(SMALL, max_frames_per_pass=16)
    codes = [random_codes(SMALL.config, frames, seed=frames) for frames in (100, 100, 3, 3, 3, 3, 3, 3, 3, 40)]
    waves = vocoder.decode(codes, [vocoder.new_state() for _ in codes], [True] * len(codes))
    sizes = [streams * frames for streams, frames, _ in passes]
    assert max(sizes) <= 16
    assert sum(sizes) == sum(map(len, codes))
    for wave, frames in zip(waves, codes, strict=True):
        check_equal(wave, expected(SMALL, frames))


def test_loud_sound_is_clamped() -> None:
    model = reference(small_config(), seed=9)
    model.decoder[-1].conv.weight.data *= 30
    codes = random_codes(model.config, 30, seed=0)
    wave = stream(vocoder_like(model), codes, (4,))
    assert wave.abs().max() == 1.0
    torch.testing.assert_close(wave, expected(model, codes), atol=1e-4, rtol=0)


def test_half_precision_streams_like_it_decodes_at_once() -> None:
    model = reference(small_config(), seed=4)
    codes = random_codes(model.config, 40, seed=1)
    exact = expected(model, codes)
    vocoder = vocoder_like(model).bfloat16()
    whole, streamed = stream(vocoder, codes, (40,)), stream(vocoder, codes, (4, 9))
    assert whole.dtype == streamed.dtype == torch.float32
    assert whole.shape == streamed.shape == exact.shape
    assert exact.std() > 0.05 and (exact.abs() < 1).float().mean() > 0.8, "sound that is not clamped"
    theirs = (expected(model.bfloat16(), codes).float() - exact).abs().mean()
    assert (streamed - exact).abs().mean() < 1.5 * theirs
    assert (whole - exact).abs().mean() < 1.5 * theirs


def test_streams_and_shapes_that_cannot_be_decoded_are_refused() -> None:
    vocoder, one = vocoder_like(SMALL), random_codes(SMALL.config, 1, 0)
    state = vocoder.new_state()
    for chunks, states, reason in (
        ([torch.zeros(4, 3, dtype=torch.int64)], [state], r"shape \(4, 3\).*\[frames, 4\]"),
        ([one] * 2, [state, state], "twice"),
        ([one], [state, vocoder.new_state()], "do not match"),
    ):
        with pytest.raises(ValueError, match=reason):
            vocoder.decode(chunks, states, [False] * len(states))
    assert state.frames == 0
    vocoder.decode([one], [state], [True])
    with pytest.raises(ValueError, match="ended"):
        vocoder.decode([one], [state], [True])


def test_wrong_configurations_are_refused() -> None:
    with pytest.raises(ValueError, match="max_frames_per_pass"):
        vocoder_like(SMALL, max_frames_per_pass=0)
    config = small_config()
    config.rope_parameters = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(ValueError, match=r"rope_type: 'linear'"):
        Vocoder(config)
