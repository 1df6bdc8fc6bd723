"""Changes by operators in a running deployment: sleeping replicas, and LoRA adapters that clients may name.

The head keeps the state; every API server has a copy. A change is a message, and the same change leads from the same
state to the same state everywhere. Replicas are written `talker/0`. Pure.
"""

from __future__ import annotations

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
