"""Payloads inside `extra_args`."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from vllm_omni_ext.wire.handoff import CHUNK, EXPORT, PROMPT, chunk_of, export_ranges


@pytest.mark.parametrize("extra", [None, {}, {"other": 1}])
def test_without_a_payload_the_prompt_is_empty_and_closed(extra: Any) -> None:
    assert chunk_of(extra) == ({"last": True}, False)


def test_a_prompt_and_a_chunk_are_told_apart() -> None:
    assert chunk_of({PROMPT: {"track": [1]}}) == ({"track": [1]}, False)
    assert chunk_of({CHUNK: {"track": [2], "last": True}}) == ({"track": [2], "last": True}, True)
    assert chunk_of({CHUNK: {}}) == ({}, True)
    assert chunk_of({CHUNK: {"track": [2]}, PROMPT: {"track": [1]}}) == ({"track": [2]}, True)


@pytest.mark.parametrize("extra", [None, {}, {EXPORT: []}, {"other": [[1, 2]]}])
def test_most_requests_export_nothing(extra: Any) -> None:
    assert export_ranges(extra) == []


def test_ranges_survive_the_wire() -> None:
    sent = SamplingParams(extra_args={EXPORT: [[3, 9], [12, 13]], PROMPT: {"positions": b"\0\1", "track": [5]}})
    got = MsgpackDecoder(SamplingParams).decode(MsgpackEncoder().encode(sent))
    assert export_ranges(got.extra_args) == [(3, 9), (12, 13)]
    assert chunk_of(got.extra_args) == ({"positions": b"\0\1", "track": [5]}, False)
