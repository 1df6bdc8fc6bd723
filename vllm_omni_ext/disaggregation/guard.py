"""Which blocks of a decode replica may still be written to by somebody else.

A transfer that decode has given up can go on: whatever was on its way lands when the sender, or this process, runs
again. Its blocks must not be anybody else's by then. So they are held, besides by their request, from the moment they
are promised to a sender until it is certain that nothing more comes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

from vllm_omni_ext.disaggregation.pulls import Transfer


class Pool(Protocol):
    """What is used of vLLM's `BlockPool`."""

    def touch(self, blocks: Sequence[Any]) -> None:
        """Hold blocks once more."""

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        """Hold blocks once less."""


@dataclass
class Settled(KVConnectorWorkerMetadata):
    """Of each transfer: how many workers say that nothing more is written."""

    counts: Counter[Transfer]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Settled:
        """Several workers' words as one."""
        assert isinstance(other, Settled)
        return Settled(self.counts + other.counts)


class Guard:
    """Holds blocks until every worker has said that the transfer into them is settled."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._pool: Pool | None = None
        self._held: dict[Transfer, list[Any]] = {}
        self._said: Counter[Transfer] = Counter()

    def __bool__(self) -> bool:
        return bool(self._held)

    @property
    def blocks(self) -> int:
        """How many blocks are held."""
        return sum(map(len, self._held.values()))

    def bind(self, pool: Pool) -> None:
        """Say where blocks come from."""
        self._pool = pool

    def hold(self, transfer: Transfer, blocks: Sequence[Any]) -> None:
        """Blocks are promised to a sender."""
        assert self._pool is not None
        self._pool.touch(blocks)
        self._held.setdefault(transfer, []).extend(blocks)

    def settle(self, counts: Mapping[Transfer, int]) -> None:
        """Workers have said of these that nothing more is written."""
        assert self._pool is not None
        self._said.update(counts)
        for transfer in counts:
            if self._said[transfer] >= self._workers:
                del self._said[transfer]
                self._pool.free_blocks(reversed(self._held.pop(transfer, [])))
