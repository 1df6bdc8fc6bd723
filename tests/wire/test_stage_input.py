"""Inputs of stages inside vLLM's request messages, and messages in a tensor."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from vllm_omni_ext.wire.envelope import (
    MAGIC,
    HiddenStatesChunkReady,
    Message,
    StageError,
    StageProgress,
    pack,
    unpack,
)
from vllm_omni_ext.wire.stage_input import (
    CHUNK,
    END,
    EXPORT,
    INPUT,
    HiddenStatesRef,
    PartHeader,
    StageInput,
    export_ranges,
)

REF = HiddenStatesRef(source="tcp://h:1#00", name="7/r", count=5)


class Prompt(msgspec.Struct, frozen=True, tag="prompt"):
    """A plugin's message."""

    ids: list[int]
    positions: bytes | None = None


headers = st.builds(
    PartHeader,
    stream=st.text(max_size=20),
    part=st.integers(END, 10_000),
    last=st.booleans(),
    empty=st.booleans(),
    payload=st.one_of(st.none(), st.dictionaries(st.text(max_size=3), st.binary(max_size=3))),
)


def test_an_opening_and_a_later_chunk_are_distinguished() -> None:
    assert [StageInput.of(extra) for extra in (None, {}, {"other": 1})] == [(StageInput(), False)] * 3
    assert StageInput().prompt_positions is None and StageInput().last
    assert StageInput.of({INPUT: {"step_inputs": 1}}) == (StageInput(step_inputs=1), False)
    assert StageInput.of({CHUNK: {"step_inputs": 2, "last": False}}) == (StageInput(step_inputs=2, last=False), True)
    assert StageInput.of({CHUNK: {}}) == (StageInput(), True)
    assert StageInput.of({CHUNK: {"done": 1}, INPUT: {"done": 2}}) == (StageInput(done=1), True)


def test_an_input_survives_the_encoding_of_vllm() -> None:
    sent_input = StageInput(
        prompt_positions=0,
        step_inputs=3,
        last=False,
        hidden_spans=((1, 4), (6, 7)),
        hidden_states=REF,
        done=2,
        payload=Prompt([1, 2], b"\0\1"),
    )
    sent = MsgpackEncoder().encode(SamplingParams(extra_args={INPUT: sent_input}))
    got, later = StageInput.of(MsgpackDecoder(SamplingParams).decode(sent).extra_args)
    assert not later and msgspec.convert(got.payload, Prompt) == Prompt([1, 2], b"\0\1")
    assert msgspec.structs.replace(got, payload=None) == msgspec.structs.replace(sent_input, payload=None)


def test_ranges_survive_the_encoding_of_vllm() -> None:
    sent = SamplingParams(extra_args={EXPORT: [[3, 9], [12, 13]]})
    got = MsgpackDecoder(SamplingParams).decode(MsgpackEncoder().encode(sent))
    assert export_ranges(got.extra_args) == [(3, 9), (12, 13)]
    assert [export_ranges(extra) for extra in (None, {}, {EXPORT: []}, {"other": [[1, 2]]})] == [[]] * 4


@given(headers)
def test_a_header_survives_the_encoding_of_vllm(header: PartHeader) -> None:
    sent = msgspec.msgpack.encode(PoolingParams(task="token_embed", extra_kwargs=header.as_extra()))
    got = msgspec.msgpack.decode(sent, type=PoolingParams)
    assert PartHeader.of(got.extra_kwargs) == header


@pytest.mark.parametrize(
    "extra",
    [
        None,
        {"stream": "a"},
        {"stream": 1, "part": 0, "last": True},
        {"stream": "a", "part": 0, "last": True, "unknown": 1},
    ],
)
def test_other_data_is_no_header(extra: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        PartHeader.of(extra)


CHUNK_READY = HiddenStatesChunkReady(source="ipc://@omni-1#00", name="7/r-é", first=3, count=5, failed="no room")

messages = st.one_of(
    st.builds(StageError, st.text()),
    st.builds(StageProgress, st.integers(0, 1000), st.integers(0, 1000)),
    st.just(CHUNK_READY),
)


@given(messages)
def test_a_message_is_read_back(message: Message) -> None:
    tensor = pack(message)
    assert (tensor.dtype, tensor.dim()) == (torch.uint8, 1)
    assert unpack(tensor) == message


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
def test_tensors_of_the_model_are_no_messages(tensor: torch.Tensor) -> None:
    assert unpack(tensor) is None


@pytest.mark.parametrize("rest", [b"", b"\xff" * 9, msgspec.msgpack.encode({"type": "other"})])
def test_other_data_after_the_prefix_is_refused(rest: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):  # a ValidationError is one
        unpack(torch.frombuffer(bytearray(MAGIC + rest), dtype=torch.uint8))
