"""Messages in a tensor: errors, progress, and where hidden states are."""

from __future__ import annotations

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_ext.wire.envelope import (
    MAGIC,
    HiddenStatesChunkReady,
    Message,
    StageError,
    StageProgress,
    pack,
    unpack,
)

CHUNK_READY = HiddenStatesChunkReady(source="ipc://@omni-1#00", name="7/r-é", first=3, count=5, failed="no room")

messages = st.one_of(
    st.builds(StageError, st.text()),
    st.builds(StageProgress, st.integers(0, 1000), st.integers(0, 1000)),
    st.just(CHUNK_READY),
)


@given(messages)
def test_a_message_is_read_back(message: Message) -> None:
    assert unpack(pack(message)) == message


def test_a_message_about_hidden_states_is_a_small_tensor() -> None:
    tensor = pack(CHUNK_READY)
    assert (tensor.dtype, tensor.dim()) == (torch.uint8, 1)
    assert len(tensor) < 200


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(4),
        torch.zeros(0, dtype=torch.uint8),
        torch.full((90,), 255, dtype=torch.uint8),
        torch.zeros(8, 8, 3, dtype=torch.uint8),
        torch.frombuffer(bytearray(MAGIC[:-1]), dtype=torch.uint8),
    ],
    ids=["samples", "empty", "bytes", "image", "half a prefix"],
)
def test_data_of_the_model_is_no_message(tensor: torch.Tensor) -> None:
    assert unpack(tensor) is None


@pytest.mark.parametrize("rest", [b"", b"\xff" * 9, msgspec.msgpack.encode({"type": "other"})])
def test_anything_else_behind_the_prefix_is_refused(rest: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):  # a ValidationError is one
        unpack(torch.frombuffer(bytearray(MAGIC + rest), dtype=torch.uint8))
