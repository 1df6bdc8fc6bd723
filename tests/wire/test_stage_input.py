"""Inputs of stages inside vLLM's own request messages."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

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


@pytest.mark.parametrize("extra", [None, {}, {"other": 1}])
def test_a_request_without_an_input_has_all_of_it(extra: Any) -> None:
    assert StageInput.of(extra) == (StageInput(), False)
    assert StageInput().prompt_positions is None and StageInput().last


def test_an_opening_and_a_later_chunk_are_told_apart() -> None:
    assert StageInput.of({INPUT: {"step_inputs": 1}}) == (StageInput(step_inputs=1), False)
    assert StageInput.of({CHUNK: {"step_inputs": 2, "last": False}}) == (StageInput(step_inputs=2, last=False), True)
    assert StageInput.of({CHUNK: {}}) == (StageInput(), True)
    assert StageInput.of({CHUNK: {"done": 1}, INPUT: {"done": 2}}) == (StageInput(done=1), True)


def test_an_input_survives_the_wire() -> None:
    given_ = StageInput(
        prompt_positions=0,
        step_inputs=3,
        last=False,
        hidden_spans=((1, 4), (6, 7)),
        hidden_states=REF,
        done=2,
        payload=Prompt([1, 2], b"\0\1"),
    )
    sent = MsgpackEncoder().encode(SamplingParams(extra_args={INPUT: given_}))
    got, later = StageInput.of(MsgpackDecoder(SamplingParams).decode(sent).extra_args)
    assert not later and msgspec.convert(got.payload, Prompt) == Prompt([1, 2], b"\0\1")
    assert msgspec.structs.replace(got, payload=None) == msgspec.structs.replace(given_, payload=None)


@pytest.mark.parametrize("extra", [None, {}, {EXPORT: []}, {"other": [[1, 2]]}])
def test_most_requests_export_nothing(extra: Any) -> None:
    assert export_ranges(extra) == []


def test_ranges_survive_the_wire() -> None:
    sent = SamplingParams(extra_args={EXPORT: [[3, 9], [12, 13]]})
    got = MsgpackDecoder(SamplingParams).decode(MsgpackEncoder().encode(sent))
    assert export_ranges(got.extra_args) == [(3, 9), (12, 13)]


@given(headers)
def test_a_header_survives_vllms_own_encoding(header: PartHeader) -> None:
    sent = msgspec.msgpack.encode(PoolingParams(task="token_embed", extra_kwargs=header.as_extra()))
    got = msgspec.msgpack.decode(sent, type=PoolingParams)
    assert PartHeader.of(got.extra_kwargs) == header


@pytest.mark.parametrize("extra", [None, {}, {"stream": "a"}, {"stream": 1, "part": 0, "last": True}, {"last": True}])
def test_anything_else_is_refused(extra: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        PartHeader.of(extra)


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="more"):
        PartHeader.of({**PartHeader(stream="a", part=0, last=True).as_extra(), "more": 1})
