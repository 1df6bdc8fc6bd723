"""Blocks that a transfer may still write into are not given to another request (vLLM's block pool)."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from vllm.v1.core.block_pool import BlockPool

from vllm_omni_ext.disaggregation.block_hold import BlockHold, Settled

A, B = ("a", "1"), ("b", "2")


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(num_gpu_blocks=8, enable_caching=False, hash_block_size=16)


def free(pool: Any) -> int:
    return int(pool.get_num_free_blocks())


def hold(pool: BlockPool, count: int, workers: int = 1) -> tuple[BlockHold, list[Any]]:
    """Hold new blocks for the transfer A."""
    guard, blocks = BlockHold(workers), pool.get_new_blocks(count)
    guard.bind(pool)
    guard.hold(A, blocks)
    return guard, blocks


def test_block_freed_by_its_request_is_not_reused_before_it_is_settled(pool: BlockPool) -> None:
    guard, blocks = hold(pool, 3)
    pool.free_blocks(blocks)
    assert (free(pool), bool(guard)) == (4, True)
    others = pool.get_new_blocks(4)
    assert not {b.block_id for b in others} & {b.block_id for b in blocks}
    guard.settle({A: 1})
    assert (free(pool), bool(guard)) == (3, False)


def test_block_settled_first_stays_with_its_request(pool: BlockPool) -> None:
    guard, blocks = hold(pool, 3)
    guard.settle({A: 1, B: 1})  # nothing is held for B
    assert free(pool) == 4
    pool.free_blocks(blocks)
    assert free(pool) == 7


def test_block_hold_ends_only_when_all_workers_have_settled(pool: BlockPool) -> None:
    guard, blocks = hold(pool, 2, workers=3)
    pool.free_blocks(blocks)
    guard.settle({A: 1})
    guard.settle({A: 1, B: 1})
    assert free(pool) == 5
    guard.settle(Settled(Counter({A: 1})).aggregate(Settled(Counter({B: 1}))).counts)
    assert free(pool) == 7
