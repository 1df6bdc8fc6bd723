"""Changes of operators, which the head passes on to all API servers. The one that was asked answers when all know."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from vllm_omni_ext.wire.operator_state import Change, OperatorState, ReplicasSlept


@dataclass
class _Pending:
    """A change that not all API servers have made yet: who asked for it, under which number, and who is waited for."""

    server: int
    number: int
    left: set[int]


Settled = tuple[int, int]
"""A change that all API servers have made: the API server that asked for it, and the number it gave the change."""


class OperatorChanges:
    """The deployment's operator state, and the changes on their way. Pure; the caller sends the messages."""

    def __init__(self) -> None:
        self.state = OperatorState()
        self._version = 0
        self._pending: dict[int, _Pending] = {}

    def asked(self, server: int, number: int, change: Change, servers: Iterable[int]) -> int:
        """An API server asks for a change, which is made here now. Returns the version to send to all `servers`."""
        self.state = self.state.after(change)
        self._version += 1
        self._pending[self._version] = _Pending(server, number, set(servers))
        return self._version

    def made(self, server: int, version: int) -> list[Settled]:
        """An API server has made a change. Returns what all have made now."""
        if (pending := self._pending.get(version)) is not None:
            pending.left.discard(server)
        return self._settled()

    def server_lost(self, server: int) -> list[Settled]:
        """An API server has died: nobody waits for it, and it waits for nobody. Returns what all others have made."""
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
