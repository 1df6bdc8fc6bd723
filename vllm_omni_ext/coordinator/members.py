"""Replicas and what is said of them: the words of coordinator, replicas and subscribers. Frozen data.

Times (`at`) are seconds of one monotonic clock.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypeAlias

from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.pool.load import Load


class State(enum.Enum):
    """State of a replica; `membership` draws how they follow each other."""

    JOINING = "joining"
    UP = "up"
    SUSPECT = "suspect"
    DOWN = "down"
    DRAINING = "draining"


ATTACHED = frozenset({State.UP, State.SUSPECT, State.DRAINING})
"""In these states a replica's requests go on."""


@dataclass(frozen=True, kw_only=True)
class Descriptor:
    """What a replica says of itself.

    Attributes:
        instance: text that no other process uses or can guess, e.g. a random UUID. Who knows it speaks for the replica.
        config_hash: of everything that the stage's replicas must agree on.
        version: of this package.
        address: where API servers reach it; only passed on.
    """

    instance: str
    stage: str
    model: str
    config_hash: str
    version: str
    address: str = ""


@dataclass(frozen=True, order=True, slots=True)
class Member:
    """A replica's name and which of its bearers is meant, printed `talker/1#7`."""

    id: ReplicaId
    epoch: int

    def __str__(self) -> str:
        return f"{self.id}#{self.epoch}"


@dataclass(frozen=True, slots=True)
class Entry:
    """One replica in a view. `load` is None if nothing recent is known."""

    member: Member
    state: State
    load: Load | None = None
    address: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """All replicas at one moment, in order.

    Attributes:
        generation: changes when the coordinator is started again; grows.
        settled: false while a new coordinator may not yet have heard of every replica: who is missing is not gone.
        timeout_s: loads in a view older than this must not be trusted.
        dropped: messages the coordinator has thrown away as malformed.
    """

    generation: int
    settled: bool
    timeout_s: float
    replicas: tuple[Entry, ...]
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class Register:
    """A replica wants to join. One that was a member before names what it was, and gets it again if it is free.

    `index` alone asks for a name, e.g. for the replicas of the plan. Either is a wish.
    """

    descriptor: Descriptor
    at: float
    index: int | None = None
    epoch: int | None = None


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A sign of life. The coordinator numbers the reports itself. `proof` as of `Leave`."""

    member: Member
    load: Load
    at: float
    proof: str = ""


@dataclass(frozen=True, slots=True)
class Leave:
    """A replica ends: after its requests (`drain`), or now.

    `proof` is the replica's `Descriptor.instance`, which no view holds, or the head's warrant.
    """

    member: Member
    at: float
    drain: bool = True
    proof: str = ""


@dataclass(frozen=True, slots=True)
class Subscribed:
    """Somebody new wants the view."""

    at: float


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""

    at: float


Event: TypeAlias = Register | Heartbeat | Leave | Subscribed | Tick


@dataclass(frozen=True, slots=True)
class Admit:
    """To the sender: it is `member` and shall send a heartbeat every `interval_s`."""

    member: Member
    interval_s: float


@dataclass(frozen=True, slots=True)
class Refuse:
    """To the sender: it may not join."""

    reason: str


@dataclass(frozen=True, slots=True)
class NotYet:
    """To the sender: ask again a little later. The coordinator is new, and the free names may belong to somebody."""


@dataclass(frozen=True, slots=True)
class RegisterAgain:
    """To the sender: `member` is unknown here (the coordinator is new, or the replica was silent for too long)."""

    member: Member


@dataclass(frozen=True, slots=True)
class Released:
    """To the sender: nothing is expected of `member` any more; its process may end."""

    member: Member


@dataclass(frozen=True, slots=True)
class Attach:
    """A replica may be used, for the first time or again."""

    member: Member


@dataclass(frozen=True, slots=True)
class Detach:
    """The requests of a replica are lost."""

    member: Member
    reason: str


@dataclass(frozen=True, slots=True)
class Forget:
    """A replica's name is free; metrics labels and connections that bear it can go."""

    member: Member


@dataclass(frozen=True, slots=True)
class Publish:
    """To all subscribers."""

    view: View


Reply: TypeAlias = Admit | Refuse | NotYet | RegisterAgain | Released
Action: TypeAlias = Reply | Attach | Detach | Forget | Publish
