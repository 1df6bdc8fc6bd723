"""Tracks the KV transfers into a decode worker's blocks until no write can follow. Pure, for one thread."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

Transfer = tuple[str, str]
"""(request id in the decode replica, transfer id)"""


@dataclass
class _Pull:
    since: float
    workers_queried: int = 0
    answered: int = 0
    over: bool = False
    failed: bool = False


class PendingTransfers:
    """Tracks each transfer from `begin` until it is settled.

    A transfer is settled when it has arrived or failed, and each queried prefill worker has answered or ended.
    """

    def __init__(self) -> None:
        self._open: dict[Transfer, _Pull] = {}

    def __bool__(self) -> bool:
        return bool(self._open)

    def begin(self, transfer: Transfer, now: float) -> None:
        """Register a transfer that the scheduler has requested."""
        self._open[transfer] = _Pull(now)

    def waits(self, transfer: Transfer) -> bool:
        """Return whether the request still waits: its transfer has neither arrived nor failed."""
        pull = self._open.get(transfer)
        return pull is not None and not pull.over

    def arrived(self, transfer: Transfer, now: float) -> float:
        """Record that all blocks have arrived; return the duration of the transfer, in the unit of `now`."""
        pull = self._open[transfer]
        pull.over = True
        return now - pull.since

    def failed(self, transfer: Transfer) -> None:
        """Record that the transfer has failed; the request no longer waits for its blocks."""
        pull = self._open[transfer]
        pull.over = pull.failed = True

    def queried(self, transfers: Iterable[Transfer], workers: int) -> None:
        """Record how many prefill workers will be queried; after this call they may write blocks."""
        for transfer in transfers:
            if transfer in self._open:
                self._open[transfer].workers_queried = workers

    def answer(self, transfers: Iterable[Transfer]) -> tuple[list[Transfer], list[Transfer]]:
        """Record that one prefill worker has answered or ended, so that it writes no more blocks for these transfers.

        Returns:
            (successful, failed): the transfers that are settled by this answer.
        """
        for transfer in transfers:
            if transfer in self._open:
                self._open[transfer].answered += 1
        return self.settle(transfers)

    def settle(self, transfers: Iterable[Transfer]) -> tuple[list[Transfer], list[Transfer]]:
        """Remove the settled ones among these transfers; return them as (successful, failed)."""
        done: tuple[list[Transfer], list[Transfer]] = ([], [])
        for transfer in transfers:
            pull = self._open.get(transfer)
            if pull is not None and pull.over and pull.answered >= pull.workers_queried:
                del self._open[transfer]
                done[pull.failed].append(transfer)
        return done
