"""Operator calls of a frame and of a pass of the vocoder stay few: they are what both cost on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest


@pytest.fixture
def module(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    """The program as a module."""
    return benchmark("operator_calls")


def test_a_frame(module: ModuleType) -> None:
    calls = module.of_a_frame()
    assert calls.inside.total() <= 1205
    assert calls.beside <= 6
    assert calls.inside["mm"] == 5 * 4 * 16 + 15, "the count has seen the whole frame"


def test_an_input_row(module: ModuleType) -> None:
    assert module.of_a_row().beside <= 9


def test_a_pass_of_the_vocoder(module: ModuleType) -> None:
    calls = module.of_a_pass()
    assert calls.inside.total() <= 415
    assert calls.beside <= 11
    assert calls.inside["conv1d"] == 28, "the count has seen the whole pass"


def test_the_calls_do_not_depend_on_the_batch(module: ModuleType) -> None:
    few, many = module.of_a_frame(2), module.of_a_frame(8)
    assert (few.inside, few.outside) == (many.inside, many.outside)


@pytest.mark.parametrize("frames", [1, 16])
def test_nor_on_the_frames_of_a_pass(module: ModuleType, frames: int) -> None:
    assert module.of_a_pass(frames).inside.total() == module.of_a_pass(4).inside.total()
