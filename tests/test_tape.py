"""The stand-in for CUDA graphs notices what a graph would get wrong."""

from __future__ import annotations

import pytest
import torch

from tests.support.tape import TapeRecorder

KEPT, OUT = torch.arange(4.0), torch.zeros(4)


def test_it_repeats_on_what_is_in_memory_now() -> None:
    replay = TapeRecorder().record(lambda: torch.add(KEPT.clone().mul_(2), 1, out=OUT))
    KEPT.copy_(torch.tensor([5.0, 6.0, 7.0, 8.0]))
    replay()
    assert OUT.tolist() == [11, 13, 15, 17]
    replay()
    assert OUT.tolist() == [11, 13, 15, 17]


def test_python_is_not_run_again() -> None:
    times = iter([1.0, 2.0])
    replay = TapeRecorder().record(lambda: torch.mul(KEPT, next(times), out=OUT))
    replay()
    assert OUT.tolist() == KEPT.tolist()


def test_memory_that_nobody_keeps_is_noticed() -> None:
    given = [torch.ones(4)]
    replay = TapeRecorder().record(lambda: torch.add(KEPT, given[0][:4], out=OUT))
    replay()
    given[0] = torch.ones(4)
    with pytest.raises(AssertionError, match=r"add reads memory of shape \(4,\) that has been freed"):
        replay()


def test_numbers_of_the_host_are_noticed() -> None:
    numbers = [1.0, 2.0, 3.0, 4.0]
    replay = TapeRecorder().record(lambda: torch.add(KEPT, torch.tensor(numbers), out=OUT))
    with pytest.raises(AssertionError, match="freed"):
        replay()


@pytest.mark.parametrize("body", [lambda: KEPT.sum().item(), lambda: KEPT.nonzero(), lambda: OUT.uniform_()])
def test_what_cannot_be_captured_is_refused(body: object) -> None:
    with pytest.raises(RuntimeError, match="cannot be captured"):
        TapeRecorder().record(body)  # type: ignore[arg-type]
