"""Keeps KV blocks of a decode replica allocated while a transfer from a prefill replica may still write into them.

A cancelled transfer may still write: data on its way arrives as soon as the sender, or this process, runs again. Until
then, no other request may use the transfer's target blocks. Target blocks therefore carry an extra reference, from
allocation until every worker reports that no write can follow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

from vllm_omni_ext.disaggregation.pending_transfers import Transfer


@dataclass
class Settled(KVConnectorWorkerMetadata):
    """Report to the scheduler: for each transfer, the number of workers into whose blocks no further write can come."""

    counts: Counter[Transfer]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Settled:
        assert isinstance(other, Settled)
        return Settled(self.counts + other.counts)


class BlockHold:
    """Keeps references to blocks until every worker has reported that the transfer into them is settled.

    A transfer is settled when no write of it can follow.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._pool: Any = None
        self._held: dict[Transfer, list[Any]] = {}
        self._reports: Counter[Transfer] = Counter()

    def __bool__(self) -> bool:
        return bool(self._held)

    def bind(self, pool: Any) -> None:
        """Set vLLM's `BlockPool` to which the blocks belong."""
        self._pool = pool

    def hold(self, transfer: Transfer, blocks: Sequence[Any]) -> None:
        """Add a reference to the target blocks of a transfer, so that vLLM does not reuse them."""
        self._pool.touch(blocks)
        self._held.setdefault(transfer, []).extend(blocks)

    def settle(self, counts: Mapping[Transfer, int]) -> None:
        """Count the workers' reports (`Settled.counts`); free the blocks of transfers that all workers reported."""
        self._reports.update(counts)
        for transfer in counts:
            if self._reports[transfer] >= self._workers:
                del self._reports[transfer]
                self._pool.free_blocks(reversed(self._held.pop(transfer, [])))
