"""Rows as one tensor."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_ext.wire.rows import pack, unpack

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@given(st.integers(0, 2**40), st.integers(0, 5), st.integers(1, 9), st.sampled_from(DTYPES), st.integers(0, 99))
def test_what_is_packed_comes_out_bit_for_bit(
    first: int, count: int, width: int, dtype: torch.dtype, seed: int
) -> None:
    rows = torch.randn(count, width, generator=torch.Generator().manual_seed(seed)).to(dtype)
    blob = pack(first, rows)
    assert (blob.dtype, blob.dim()) == (torch.uint8, 1)
    index, got = unpack(blob)
    assert index == first
    assert (got.dtype, got.shape) == (dtype, rows.shape)
    assert torch.equal(got, rows)


def test_rows_of_a_view_are_packed_in_their_own_order() -> None:
    grid = torch.arange(12.0).view(3, 4)
    for view in (grid.T, grid[:, 1:3], grid[::2]):
        assert torch.equal(unpack(pack(0, view))[1], view)


def test_unpacked_rows_are_a_copy() -> None:
    blob = pack(7, torch.ones(2, 3))
    rows = unpack(blob)[1]
    blob.zero_()
    assert torch.equal(rows, torch.ones(2, 3))


def test_a_frame_at_an_odd_address_can_be_read() -> None:
    blob = pack(2, torch.arange(6.0).view(2, 3))
    moved = torch.cat([torch.zeros(3, dtype=torch.uint8), blob])[3:]
    first, rows = unpack(moved)
    assert (first, rows.tolist()) == (2, [[0, 1, 2], [3, 4, 5]])


def test_other_types_are_refused() -> None:
    with pytest.raises(ValueError):
        pack(0, torch.zeros(1, 1, dtype=torch.float64))
