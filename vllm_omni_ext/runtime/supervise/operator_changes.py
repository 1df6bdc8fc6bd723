"""Changes of operators, which the head sends to all API servers. A call returns when all have made its change."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from vllm_omni_ext.wire.operator_state import Change, OperatorState, ReplicasSlept


@dataclass
class _Pending:
    """A change that not all API servers have made yet: its API server, its number there, and the remaining servers."""

    server: int
    number: int
    left: set[int]


Settled = tuple[int, int]
"""A change that all API servers have made: the API server that sent it, and its number there."""


class OperatorChanges:
    """The deployment's operator state, and the unfinished changes. Pure; the caller sends the messages."""

    def __init__(self) -> None:
        self.state = OperatorState()
        self._version = 0
        self._pending: dict[int, _Pending] = {}

    def asked(self, server: int, number: int, change: Change, servers: Iterable[int]) -> int:
        """Make a change that an API server has sent. Returns the version to send to all `servers`."""
        self.state = self.state.after(change)
        self._version += 1
        self._pending[self._version] = _Pending(server, number, set(servers))
        return self._version

    def made(self, server: int, version: int) -> list[Settled]:
        """An API server has made a change. Returns the changes that all have made now."""
        if (pending := self._pending.get(version)) is not None:
            pending.left.discard(server)
        return self._settled()

    def server_lost(self, server: int) -> list[Settled]:
        """Drop a dead API server, and its own changes. Returns the changes that all others have made."""
        for version, pending in list(self._pending.items()):
            pending.left.discard(server)
            if pending.server == server:
                del self._pending[version]
        return self._settled()

    def replica_ended(self, replica: str) -> None:
        """A replica's process has ended; the next one is awake."""
        self.state = self.state.after(ReplicasSlept((replica,), asleep=False))

    def _settled(self) -> list[Settled]:
        over = [version for version, pending in self._pending.items() if not pending.left]
        return [(pending.server, pending.number) for pending in map(self._pending.pop, over)]
