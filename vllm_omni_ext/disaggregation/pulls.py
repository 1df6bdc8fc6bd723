"""Which transfers into this worker's blocks are under way, and when each is settled. Pure, for one thread."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

Transfer = tuple[str, str]
"""Request of the decode replica, transfer id."""


@dataclass
class _Pull:
    since: float
    asked: int = 0
    answered: int = 0
    over: bool = False
    failed: bool = False


class Pulls:
    """A transfer begins, prefill workers are asked for it, and each answers or is gone: then it is settled."""

    def __init__(self) -> None:
        self._open: dict[Transfer, _Pull] = {}

    def __bool__(self) -> bool:
        return bool(self._open)

    def begin(self, transfer: Transfer, now: float) -> None:
        """The scheduler wants its blocks filled."""
        self._open[transfer] = _Pull(now)

    def waits(self, transfer: Transfer) -> bool:
        """True if the request neither has its blocks nor does without them yet."""
        pull = self._open.get(transfer)
        return pull is not None and not pull.over

    def arrived(self, transfer: Transfer, now: float) -> float:
        """All blocks are there. Returns how long that took, in the unit of `now`."""
        pull = self._open[transfer]
        pull.over = True
        return now - pull.since

    def failed(self, transfer: Transfer) -> None:
        """The request does without them."""
        pull = self._open[transfer]
        pull.over = pull.failed = True

    def ask(self, transfers: Iterable[Transfer], workers: int) -> None:
        """So many prefill workers will be asked for these: from now on they may write."""
        for transfer in transfers:
            if transfer in self._open:
                self._open[transfer].asked = workers

    def answer(self, transfers: Iterable[Transfer]) -> tuple[list[Transfer], list[Transfer]]:
        """One prefill worker writes no more for these.

        Returns:
            Those that are settled by that: whose blocks are as they should be, and those that failed.
        """
        for transfer in transfers:
            if transfer in self._open:
                self._open[transfer].answered += 1
        return self.settle(transfers)

    def settle(self, transfers: Iterable[Transfer]) -> tuple[list[Transfer], list[Transfer]]:
        """As `answer`, for those whom nobody was asked for, or everybody has answered for."""
        done: tuple[list[Transfer], list[Transfer]] = ([], [])
        for transfer in transfers:
            pull = self._open.get(transfer)
            if pull is not None and pull.over and pull.answered >= pull.asked:
                del self._open[transfer]
                done[pull.failed].append(transfer)
        return done
