"""Changes by operators in a running deployment: sleeping replicas, and LoRA adapters that clients may name.

The head keeps the state; every API server has a copy. A change is a message, and the same change leads from the same
state to the same state everywhere. A call returns when all API servers have made the change. Replicas are written
`talker/0`. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec


class Adapter(msgspec.Struct, frozen=True):
    """A LoRA adapter of the frontend that requests may name as their model.

    Attributes:
        number: vLLM's `lora_int_id`, the adapter's id in engines.
        base: name of the model it was made for, if given.
        three_d: vLLM's `is_3d_lora_weight`.
    """

    name: str
    number: int
    path: str
    base: str | None = None
    three_d: bool = False


class ReplicasSlept(msgspec.Struct, frozen=True, tag=True):
    """Replicas are being put to sleep (`asleep`), or have been woken."""

    replicas: tuple[str, ...]
    asleep: bool


class AdapterLoaded(msgspec.Struct, frozen=True, tag=True):
    """Requests may name an adapter."""

    adapter: Adapter


class AdapterUnloaded(msgspec.Struct, frozen=True, tag=True):
    """Requests may not name an adapter any more; also sent for adapters of the command line (`--lora-modules`)."""

    name: str


Change = ReplicasSlept | AdapterLoaded | AdapterUnloaded


class OperatorState(msgspec.Struct, frozen=True):
    """All changes by operators since the start.

    Attributes:
        asleep: replicas that sleep.
        adapters: adapters that were loaded, by name.
        unloaded: names of adapters that were unloaded.
    """

    asleep: frozenset[str] = frozenset()
    adapters: dict[str, Adapter] = msgspec.field(default_factory=dict)
    unloaded: frozenset[str] = frozenset()

    def after(self, change: Change) -> OperatorState:
        """The state after a change."""
        match change:
            case ReplicasSlept(replicas, asleep):
                named = self.asleep | {*replicas} if asleep else self.asleep - {*replicas}
                return msgspec.structs.replace(self, asleep=named)
            case AdapterLoaded(adapter):
                adapters, unloaded = {**self.adapters, adapter.name: adapter}, self.unloaded - {adapter.name}
                return msgspec.structs.replace(self, adapters=adapters, unloaded=unloaded)
            case AdapterUnloaded(name):
                adapters = {other: adapter for other, adapter in self.adapters.items() if other != name}
                return msgspec.structs.replace(self, adapters=adapters, unloaded=self.unloaded | {name})


NOTHING_CHANGED = OperatorState()


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
