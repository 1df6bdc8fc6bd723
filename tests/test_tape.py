"""The stand-in for CUDA graphs fails where a graph would compute something else."""

from __future__ import annotations

import pytest
import torch

from tests.support.tape import TapeRecorder

KEPT, OUT = torch.arange(4.0), torch.zeros(4)


def test_a_recording_repeats_its_operators_on_current_memory_without_python() -> None:
    times = iter([2.0])
    replay = TapeRecorder().record(lambda: torch.add(KEPT.clone().mul_(next(times)), 1, out=OUT))
    KEPT.copy_(torch.tensor([5.0, 6.0, 7.0, 8.0]))
    for _ in range(2):
        replay()
        assert OUT.tolist() == [11, 13, 15, 17]


def test_freed_memory_and_values_of_the_host_are_errors() -> None:
    given = [torch.ones(4)]
    replay = TapeRecorder().record(lambda: torch.add(KEPT, given[0][:4], out=OUT))
    given[0] = torch.ones(4)
    with pytest.raises(AssertionError, match=r"add reads memory of shape \(4,\) that has been freed"):
        replay()
    replay = TapeRecorder().record(lambda: torch.add(KEPT, torch.tensor([1.0, 2.0, 3.0, 4.0]), out=OUT))
    with pytest.raises(AssertionError, match="freed"):
        replay()


@pytest.mark.parametrize("body", [lambda: KEPT.sum().item(), lambda: KEPT.nonzero(), lambda: OUT.uniform_()])
def test_operators_that_cannot_be_captured_are_refused(body: object) -> None:
    with pytest.raises(RuntimeError, match="cannot be captured"):
        TapeRecorder().record(body)  # type: ignore[arg-type]
