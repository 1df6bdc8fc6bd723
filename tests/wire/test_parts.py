"""Marks of parts as they travel, and refusals."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.pooling_params import PoolingParams

from vllm_omni_ext.wire.parts import END, PartMark, refusal, refused

marks = st.builds(PartMark, st.text(max_size=20), st.integers(END, 10_000), st.booleans(), st.booleans())


@given(marks)
def test_a_mark_survives_vllms_own_encoding(mark: PartMark) -> None:
    sent = msgspec.msgpack.encode(PoolingParams(task="token_embed", extra_kwargs=mark.as_extra()))
    got = msgspec.msgpack.decode(sent, type=PoolingParams)
    assert PartMark.of(got.extra_kwargs) == mark


@pytest.mark.parametrize("extra", [None, {}, {"stream": "a"}, {"stream": 1, "part": 0, "last": True}, {"last": True}])
def test_anything_else_is_refused(extra: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        PartMark.of(extra)


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="more"):
        PartMark.of({**PartMark("a", 0, True).as_extra(), "more": 1})


@given(st.text(min_size=1))
def test_a_refusal_is_read_back(why: str) -> None:
    assert refused(refusal(why)) == why


def test_samples_are_no_refusal() -> None:
    assert refused(torch.zeros(4)) is None
