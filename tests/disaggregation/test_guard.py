"""Blocks that may still be written to belong to nobody else: with vLLM's own block pool."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from vllm.v1.core.block_pool import BlockPool

from vllm_omni_ext.disaggregation.guard import Guard, Settled

A, B = ("a", "1"), ("b", "2")


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(num_gpu_blocks=8, enable_caching=False, hash_block_size=16)


def free(pool: Any) -> int:
    return int(pool.get_num_free_blocks())


def test_freed_by_its_request_a_block_is_still_nobodys(pool: BlockPool) -> None:
    guard, blocks = Guard(workers=1), pool.get_new_blocks(3)
    guard.bind(pool)
    guard.hold(A, blocks)
    pool.free_blocks(blocks)
    assert (free(pool), guard.blocks, bool(guard)) == (4, 3, True)
    others = pool.get_new_blocks(4)
    assert not {b.block_id for b in others} & {b.block_id for b in blocks}
    guard.settle({A: 1})
    assert (free(pool), guard.blocks, bool(guard)) == (3, 0, False)


def test_settled_first_a_block_stays_its_requests(pool: BlockPool) -> None:
    guard, blocks = Guard(workers=1), pool.get_new_blocks(3)
    guard.bind(pool)
    guard.hold(A, blocks)
    guard.settle({A: 1})
    assert free(pool) == 4
    pool.free_blocks(blocks)
    assert free(pool) == 7


def test_all_workers_must_say_so(pool: BlockPool) -> None:
    guard, blocks = Guard(workers=3), pool.get_new_blocks(2)
    guard.bind(pool)
    guard.hold(A, blocks)
    pool.free_blocks(blocks)
    guard.settle({A: 1})
    guard.settle({A: 1, B: 1})
    assert free(pool) == 5
    guard.settle(Settled(Counter({A: 1})).aggregate(Settled(Counter({B: 1}))).counts)
    assert free(pool) == 7


def test_what_was_never_held_may_be_settled(pool: BlockPool) -> None:
    guard = Guard(workers=1)
    guard.bind(pool)
    guard.settle({A: 1})
    assert free(pool) == 7
