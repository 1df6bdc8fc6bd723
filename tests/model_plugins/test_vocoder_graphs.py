"""Recorded passes of the vocoder: in any combination, the sound equals Transformers'."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.examples import examples
from tests.support.tape import TapeRecorder
from tests.support.vocoder_reference import (
    check_equal,
    expected,
    random_codes,
    reference,
    small_config,
    vocoder_like,
)
from vllm_omni_ext.model_plugins.qwen3_omni import vocoder_graphs
from vllm_omni_ext.model_plugins.qwen3_omni.vocoder import Vocoder

SMALL = reference(small_config(), seed=3)
STREAMS = 3


@pytest.fixture(scope="module")
def recorded() -> tuple[Vocoder, TapeRecorder]:
    tape, vocoder = TapeRecorder(), vocoder_like(SMALL)
    vocoder.record(tape, streams=STREAMS)
    vocoder.warm_up()
    return vocoder, tape


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(12))
@given(
    st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=5).filter(sum), min_size=1, max_size=6),
    st.randoms(use_true_random=False),
)
def test_streams_in_any_parts_and_any_batch_equal_unchunked(recorded, cuts: list[list[int]], random) -> None:
    """Any sizes of parts, any streams in a call, more streams than one pass takes."""
    vocoder, tape = recorded
    whole = [random_codes(SMALL.config, sum(cut), seed=i) for i, cut in enumerate(cuts)]
    waiting = {i: list(zip(range(len(cut)), whole[i].split(cut), strict=True)) for i, cut in enumerate(cuts)}
    states, heard = {}, {i: [] for i in waiting}
    before = tape.repeated
    while live := [i for i, parts in waiting.items() if parts]:
        chosen = [i for i in live if random.random() < 0.7] or live[:1]
        parts = [waiting[i].pop(0) for i in chosen]
        for i, (number, _) in zip(chosen, parts, strict=True):
            if number == 0:
                states[i] = vocoder.new_state()
        last = [number == len(cuts[i]) - 1 for i, (number, _) in zip(chosen, parts, strict=True)]
        waves = vocoder.decode([chunk for _, chunk in parts], [states[i] for i in chosen], last)
        for i, wave in zip(chosen, waves, strict=True):
            heard[i].append(wave)
    assert tape.repeated > before
    for i, frames in enumerate(whole):
        check_equal(torch.cat(heard[i]), expected(SMALL, frames))


def test_nothing_is_computed_outside_of_the_graphs(recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    vocoder, tape = recorded
    monkeypatch.setattr(vocoder, "_pass", None)
    before = tape.repeated
    codes = [random_codes(SMALL.config, frames, seed=frames) for frames in (1 + 25 + 8 + 2, 1 + 25 + 8 + 2)]
    states = [vocoder.new_state() for _ in codes]
    waves = vocoder.decode(codes, states, [True, True])
    assert tape.repeated - before == 4  # 1, 25, 8 and 2 frames, both streams at once
    for wave, frames in zip(waves, codes, strict=True):
        check_equal(wave, expected(SMALL, frames))


def test_returned_samples_do_not_change(recorded) -> None:
    vocoder, _ = recorded
    codes = random_codes(SMALL.config, 8, seed=0)
    (wave,) = vocoder.decode([codes[:4]], [vocoder.new_state()], [False])
    copied = wave.clone()
    vocoder.decode([codes[4:]], [vocoder.new_state()], [False])
    assert torch.equal(wave, copied)


def test_every_size_of_a_part_has_its_graphs(recorded) -> None:
    vocoder, tape = recorded
    sizes = len(vocoder_graphs.FRAMES) + len(vocoder_graphs.FIRST_FRAMES)
    assert len(vocoder._graphs) == len(tape.calls) == len((4, 2, 1)) * sizes


def test_no_pass_exceeds_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocoder_graphs, "MOST_FRAMES", 8)
    monkeypatch.setattr(vocoder_graphs, "FRAMES", (4, 1))
    vocoder, tape = vocoder_like(SMALL), TapeRecorder()
    vocoder.record(tape, streams=100)
    sizes = {(key.frames, key.streams) for key in vocoder._graphs._replays}
    assert sizes == {(4, 2), (4, 1), (1, 8), (1, 4), (1, 2), (1, 1)}
    codes = [random_codes(SMALL.config, 5, seed=seed) for seed in range(5)]
    waves = vocoder.decode(codes, [vocoder.new_state() for _ in codes], [True] * 5)
    for wave, frames in zip(waves, codes, strict=True):
        check_equal(wave, expected(SMALL, frames))


def test_without_graphs_the_passes_are_computed(caplog: pytest.LogCaptureFixture) -> None:
    vocoder = vocoder_like(SMALL)
    broken = Mock(record=Mock(side_effect=RuntimeError("operation not permitted when stream is capturing")))
    vocoder.record(broken, streams=2)
    assert "no CUDA graph for" in caplog.text
    codes = random_codes(SMALL.config, 40, seed=0)
    state = vocoder.new_state()
    waves: list[Tensor] = [vocoder.decode([part], [state], [False])[0] for part in codes.split(7)]
    check_equal(torch.cat(waves), expected(SMALL, codes))
