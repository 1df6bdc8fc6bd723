"""Frames after the talker's sampling: recorded once and repeated, they are those of the function itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.model_plugins.test_code_predictor import GREEDY, HIDDEN, draw, predict, predictor
from tests.support.examples import examples
from tests.support.tape import TapeRecorder
from vllm_omni_ext.engine import graphs
from vllm_omni_ext.model_plugins.qwen3_omni.code_predictor import CodePredictor, Draw
from vllm_omni_ext.model_plugins.qwen3_omni.frames import FrameMaker

CODES, ROWS = 20, 6
TABLE = torch.randn(CODES, HIDDEN, generator=torch.Generator().manual_seed(1))


def fresh() -> CodePredictor:
    """The same weights in a predictor of its own: memory of one maker is not that of another."""
    model = CodePredictor(predictor("grouped heads").config)
    model.load_state_dict(predictor("grouped heads").state_dict())
    return model


@cache
def makers() -> tuple[FrameMaker, FrameMaker, TapeRecorder]:
    """One that calls the function, one that repeats a recording, and its recorder."""
    tape = TapeRecorder()
    called, repeated = (FrameMaker(fresh(), TABLE, rows=ROWS, recorder=recorder) for recorder in (None, tape))
    repeated.try_out()
    called.warm_up()
    repeated.warm_up()
    return called, repeated, tape


def step(maker: FrameMaker, kinds: list[str], seed: int) -> list[list[int]]:
    """Frames of one step; the hidden rows are of one request more, which has no frame."""
    hidden = torch.randn(len(kinds) + 1, HIDDEN, generator=torch.Generator().manual_seed(seed))
    live = torch.randperm(len(kinds) + 1, generator=torch.Generator().manual_seed(seed))[: len(kinds)].tolist()
    first = torch.randint(CODES, (len(kinds),), generator=torch.Generator().manual_seed(seed)).tolist()
    made = {"greedy": lambda i: GREEDY, "seeded": lambda i: draw(seed + i), "free": lambda i: Draw(greedy=False)}
    torch.manual_seed(seed)
    result = maker.make(hidden, live, first, [made[kind](i) for i, kind in enumerate(kinds)])
    assert result.dtype == torch.int32
    assert result[:, 0].tolist() == first
    return result.tolist()


kinds = st.lists(st.sampled_from(["greedy", "seeded", "free"]), min_size=1, max_size=ROWS)


@settings(deadline=None, max_examples=examples(40))
@given(st.lists(st.tuples(kinds, st.integers(0, 10**6)), min_size=1, max_size=4))
def test_repeated_frames_are_those_of_the_function(steps: list[tuple[list[str], int]]) -> None:
    """Requests come and go from step to step, in every bucket, with rows that pad it."""
    called, repeated, tape = makers()
    before = tape.repeated
    for batch, seed in steps:
        assert step(repeated, batch, seed) == step(called, batch, seed)
    assert tape.repeated - before == len(steps)


@pytest.mark.parametrize("count", range(1, ROWS + 1))
def test_frames_are_those_of_the_predictor(count: int) -> None:
    hidden = torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(count))
    first = [(3 * i + count) % CODES for i in range(count)]
    wanted = predict(predictor("grouped heads"), hidden, TABLE[first], [draw(i) for i in range(count)])
    for maker in makers()[:2]:
        frames = maker.make(hidden, range(count), first, [draw(i) for i in range(count)])
        assert frames[:, 1:].tolist() == wanted.tolist()


def test_every_bucket_is_recorded_the_largest_first() -> None:
    _, repeated, tape = makers()
    assert repeated.recorded == [8, 4, 2, 1]
    assert len(tape.calls) == 4


def test_a_returned_frame_does_not_change() -> None:
    for maker in makers()[:2]:
        hidden = torch.randn(2, HIDDEN)
        before = maker.make(hidden[:1], [0], [3], [GREEDY])
        copied = before.tolist()
        maker.make(hidden[1:], [0], [7], [GREEDY])
        assert before.tolist() == copied


def test_warming_up_draws_no_random_number() -> None:
    maker, before = FrameMaker(fresh(), TABLE, rows=1), torch.get_rng_state()
    maker.warm_up()
    assert torch.equal(torch.get_rng_state(), before)


def test_more_frames_than_there_is_room_for_are_refused() -> None:
    with pytest.raises(ValueError, match="9 frames at once; there is room for 8"):
        makers()[0].make(torch.zeros(9, HIDDEN), range(9), [0] * 9, [GREEDY] * 9)


class Broken:
    """Cannot record more than two rows."""

    def __init__(self) -> None:
        self.tape = TapeRecorder()

    def record(self, body: object) -> object:
        replay = self.tape.record(body)  # type: ignore[arg-type]
        if len(self.tape.calls) < 3:
            raise RuntimeError("operation not permitted when stream is capturing")
        return replay


def test_without_a_graph_the_function_is_called(caplog: pytest.LogCaptureFixture) -> None:
    maker = FrameMaker(fresh(), TABLE, rows=ROWS, recorder=Broken())  # type: ignore[arg-type]
    maker.warm_up()
    assert maker.recorded == [2, 1]
    assert "no CUDA graph for frames of 8 requests" in caplog.text
    for count in (1, 2, 5):
        batch = (["seeded", "greedy"] * 3)[:count]
        assert step(maker, batch, count) == step(makers()[0], batch, count)


@pytest.mark.parametrize(("most", "sizes"), [(1, [1]), (2, [2, 1]), (5, [8, 4, 2, 1]), (64, [64, 32, 16, 8, 4, 2, 1])])
def test_buckets_are_powers_of_two(most: int, sizes: list[int]) -> None:
    assert graphs.buckets(most) == sizes
    assert graphs.bucket_of(most, sizes) == sizes[0]
    assert graphs.bucket_of(sizes[0] + 1, sizes) is None


def test_there_are_no_graphs_on_a_cpu_or_in_eager_mode() -> None:
    assert graphs.recorder_for(torch.device("cpu"), eager=False) is None
    assert graphs.recorder_for(torch.device("cuda"), eager=True) is None


# -- operator calls, which a frame and a pass of the vocoder cost on a GPU ------------------------------


@pytest.fixture
def module(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    """The program as a module."""
    return benchmark("operator_calls")


def test_a_frame_and_its_input_row_take_few_calls(module: ModuleType) -> None:
    calls = module.of_a_frame()
    assert calls.inside.total() <= 1205
    assert calls.beside <= 6
    assert calls.inside["mm"] == 5 * 4 * 16 + 15, "the count has seen the whole frame"
    assert module.of_a_row().beside <= 9


def test_a_pass_of_the_vocoder_takes_few_calls(module: ModuleType) -> None:
    calls = module.of_a_pass()
    assert calls.inside.total() <= 415
    assert calls.beside <= 11
    assert calls.inside["conv1d"] == 28, "the count has seen the whole pass"


@pytest.mark.slow
def test_the_calls_do_not_depend_on_the_batch_or_the_length_of_a_pass(module: ModuleType) -> None:
    few, many = module.of_a_frame(2), module.of_a_frame(8)
    assert (few.inside, few.outside) == (many.inside, many.outside)
    assert module.of_a_pass(1).inside.total() == module.of_a_pass(16).inside.total()
