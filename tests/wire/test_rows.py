"""What is said about rows that travel beside the messages."""

from __future__ import annotations

import msgspec
import pytest
import torch

from vllm_omni_ext.wire.handoff import GIVEN
from vllm_omni_ext.wire.rows import Given, Notice

NOTICE = Notice(source="ipc://@omni-1#00", name="7/r-é", first=3, count=5, failed="no room")


def test_a_notice_is_a_small_tensor() -> None:
    tensor = NOTICE.tensor()
    assert (tensor.dtype, tensor.dim()) == (torch.uint8, 1)
    assert len(tensor) < 200
    assert Notice.of(tensor) == NOTICE


@pytest.mark.parametrize("tensor", [torch.zeros(0, dtype=torch.uint8), torch.full((9,), 255, dtype=torch.uint8)])
def test_anything_else_is_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(msgspec.DecodeError):
        Notice.of(tensor)


def test_what_is_given_survives_a_payload() -> None:
    given = Given(source="tcp://h:1#00", name="7/r", count=5)
    assert Given.of({"track": [], GIVEN: given.plain()}) == given
    assert Given.of({"track": []}) is None
