"""Streams of parts: with any parts in any batch, the sound of each stream equals that of its whole utterance."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.examples import examples
from tests.support.vocoder_reference import (
    check_equal,
    expected,
    header,
    random_codes,
    reference,
    small_config,
    vocoder_like,
)
from vllm_omni_ext.model_plugins.qwen3_omni.vocoder import VocoderState
from vllm_omni_ext.model_plugins.qwen3_omni.vocoder_streams import VocoderStreams
from vllm_omni_ext.model_plugins.qwen_omni.part_streams import Answer, Job
from vllm_omni_ext.wire.envelope import StageError
from vllm_omni_ext.wire.stage_input import PartHeader

REFERENCE = reference(small_config(), seed=2)
VOCODER = vocoder_like(REFERENCE)
IDLE_S = 10.0


@pytest.fixture
def clock() -> SimpleNamespace:
    return SimpleNamespace(now=0.0)


@pytest.fixture
def streams(clock: SimpleNamespace) -> VocoderStreams:
    return VocoderStreams(VOCODER, idle_s=IDLE_S, most=8, clock=lambda: clock.now)


def codes(frames: int, seed: int = 0) -> Tensor:
    return random_codes(REFERENCE.config, frames, seed=seed)


@settings(deadline=None, max_examples=examples(40), suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(sum), min_size=1, max_size=8),
    st.randoms(use_true_random=False),
)
def test_any_parts_in_any_batch_equal_the_whole_utterance(cuts: list[list[int]], random) -> None:
    """Each stream's parts come in order, any number of any streams in a step, shuffled within it."""
    streams = VocoderStreams(VOCODER, idle_s=IDLE_S, most=8)
    whole = [codes(sum(cut), seed=i) for i, cut in enumerate(cuts)]
    waiting = {i: list(zip(range(len(cut)), whole[i].split(cut), strict=True)) for i, cut in enumerate(cuts)}
    heard: dict[int, dict[int, Tensor]] = {i: {} for i in waiting}
    while any(waiting.values()):
        step = []
        first = random.choice([i for i, parts in waiting.items() if parts])  # or most steps would be empty
        for i, parts in waiting.items():
            for _ in range(random.randint(int(i == first), len(parts))):
                number, chunk = parts.pop(0)
                step.append((i, number, chunk))
        random.shuffle(step)
        headers = [header(str(i), number, number == len(cuts[i]) - 1) for i, number, _ in step]
        answers = streams.decode(headers, [chunk for *_, chunk in step])
        for (i, number, _), answer in zip(step, answers, strict=True):
            assert isinstance(answer, Tensor)
            heard[i][number] = answer
    for i, frames in enumerate(whole):
        check_equal(torch.cat([heard[i][number] for number in sorted(heard[i])]), expected(REFERENCE, frames))
    assert len(streams) == 0
    assert streams.frames == sum(map(len, whole))  # nothing is decoded twice


def test_a_gap_ends_the_stream_and_no_other(streams: VocoderStreams) -> None:
    frames = codes(6)
    streams.decode([header("a", 0, False), header("b", 0, False)], [frames[:2], frames[:2]])
    bad, good = streams.decode([header("a", 2, False), header("b", 1, True)], [frames[4:], frames[2:]])
    assert bad == "part 2 came where 1 was due"
    assert isinstance(good, Tensor)
    (late,) = streams.decode([header("a", 1, False)], [frames[2:4]])
    assert late == StageError("part 1 came for a stream that is not open", lost=True)


def test_parts_before_a_bad_one_are_decoded_and_those_after_it_refused(streams: VocoderStreams) -> None:
    frames = codes(3)
    headers = [header("a", number, False) for number in range(3)]
    first, second, third = streams.decode(headers, [frames[:2], "no codes", frames[2:]])
    check_equal(first, expected(REFERENCE, frames)[: len(first)])
    assert (second, third) == ("no codes", StageError("part 2 came for a stream that is not open", lost=True))
    assert len(streams) == 0


def test_a_part_after_the_last_one_is_refused_even_in_the_same_step(streams: VocoderStreams) -> None:
    frames = codes(3)
    first, second = streams.decode([header("a", 0, True), header("a", 1, False)], [frames[:2], frames[2:]])
    assert isinstance(first, Tensor)
    assert second == StageError("part 1 came for a stream that is not open")
    assert len(streams) == 0


def test_part_0_starts_the_stream_again(streams: VocoderStreams) -> None:
    frames = codes(5)
    streams.decode([header("a", 0, False)], [codes(3, seed=9)])
    (whole,) = streams.decode([header("a", 0, True)], [frames])
    check_equal(whole, expected(REFERENCE, frames))


def test_an_end_header_frees_the_stream_with_its_parts_of_the_same_step(streams: VocoderStreams) -> None:
    frames = codes(2)
    streams.decode([header("a", 0, False)], [frames])
    end, _ = streams.decode([PartHeader.end("a"), header("a", 1, False)], [frames[:0], frames])
    assert isinstance(end, Tensor) and len(end) == 0
    assert len(streams) == 0
    streams.decode([PartHeader.end("unknown")], [frames[:0]])


def test_an_idle_stream_is_freed(streams: VocoderStreams, clock: SimpleNamespace) -> None:
    frames = codes(4)
    streams.decode([header("a", 0, False), header("b", 0, False)], [frames[:1], frames[:1]])
    for clock.now in range(1, int(IDLE_S) + 1):
        streams.decode([header("a", clock.now, False)], [frames[:0]])
    assert len(streams) == 2
    clock.now = IDLE_S + 1
    (a,) = streams.decode([header("a", 11, True)], [frames[1:]])
    assert isinstance(a, Tensor)
    assert len(streams) == 0
    (b,) = streams.decode([header("b", 1, True)], [frames[1:]])
    assert b == StageError("part 1 came for a stream that is not open", lost=True)  # it is sent again


def test_streams_continue_after_a_sleep_of_the_stage(streams: VocoderStreams, clock: SimpleNamespace) -> None:
    """Streams of a client that is gone are still freed, when the stage has decoded for long enough."""
    frames = codes(4)
    headers = [header(name, 0, False) for name in ("a", "b", "gone")]
    first, *_ = streams.decode(headers, [frames[:1]] * 3)
    clock.now = 100 * IDLE_S
    streams.decode([header("a", 1, False)], [frames[1:2]])
    (b,) = streams.decode([header("b", 1, True)], [frames[1:]])
    check_equal(torch.cat([first, b]), expected(REFERENCE, frames))
    for part in range(2, 10):
        clock.now += IDLE_S
        assert len(streams) == 2
        streams.decode([header("a", part, False)], [frames[:0]])
    assert len(streams) == 1


def test_states_of_more_streams_than_planned_are_in_host_memory(
    clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sound is the same. The device has the states of the last streams, also during a step with many."""
    streams, here, most, moves = (
        VocoderStreams(VOCODER, idle_s=IDLE_S, most=2, clock=lambda: clock.now),
        set[int](),
        [],
        0,
    )
    opened, move, run = VOCODER.new_state, streams._move, streams._run

    def new_state() -> VocoderState:
        here.add(id(state := opened()))
        most.append(len(here))
        return state

    def moved(state: VocoderState, *, to_host: bool) -> None:
        nonlocal moves
        moves += 1
        assert (id(state) in here) == to_host
        (here.remove if to_host else here.add)(id(state))
        most.append(len(here))
        move(state, to_host=to_host)

    def ran(jobs: Sequence[Job], answers: list[Answer]) -> None:
        assert {id(job.stream.state) for job in jobs} <= here
        run(jobs, answers)

    monkeypatch.setattr(VOCODER, "new_state", new_state)
    monkeypatch.setattr(streams, "_move", moved)
    monkeypatch.setattr(streams, "_run", ran)
    frames, names = codes(6), "abcde"
    made: dict[str, list[Tensor]] = {name: [] for name in names}
    for part in range(3):
        for some in ("a", "bc", "de") if part < 2 else (names,):
            clock.now += 1.0
            headers = [header(name, part, part == 2) for name in some]
            answers = streams.decode(headers, [frames[2 * part : 2 * part + 2]] * len(some))
            for name, answer in zip(some, answers, strict=True):
                assert isinstance(answer, Tensor)
                made[name].append(answer)
    assert max(most) == 2 and moves > 5 and len(streams) == 0
    for name in names:
        check_equal(torch.cat(made[name]), expected(REFERENCE, frames))
