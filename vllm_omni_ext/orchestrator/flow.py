"""Request flow: events in, actions out. Pure: no vLLM, no torch, no sockets, no clock.

A pipeline plugin implements `Flow`; the orchestrator reports what stages produced and does what the flow asks for.
Tensors pass through as opaque objects.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Finish = Literal["stop", "length", "abort", "error", "repetition"]


@dataclass(frozen=True, slots=True)
class Produced:
    """What one engine step of a stage gave for this request.

    Attributes:
        stage: name of the stage.
        tokens: new token ids.
        payload: the step's tensor, if any.
        finish: why the request has ended in that stage; None while it goes on.
        part: which part of a stream this answers (see `Feed`); None for other stages.
        at: when, in seconds of any clock that only goes forward.
    """

    stage: str
    tokens: tuple[int, ...] = ()
    payload: Any = None
    finish: Finish | None = None
    part: int | None = None
    at: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class Open:
    """Open the request in a fed stage.

    Attributes:
        prompt: token ids as the stage's engine counts them.
        handoff: payload (see `wire.handoff`); its "last" says that no `Extend` follows.
        stop: token ids that end the request in that stage.
        done: how many tokens at the end of `prompt` this stage has made already (before it was lost).
    """

    stage: str
    prompt: list[int]
    handoff: Mapping[str, Any] = field(default_factory=dict)
    stop: tuple[int, ...] = ()
    done: int = 0

    @property
    def last(self) -> bool:
        """Whether the stage has got all its input with this."""
        return bool(self.handoff.get("last", True))


@dataclass(frozen=True, slots=True)
class Extend:
    """Hand one more chunk to a fed stage in which the request is open.

    Attributes:
        prompt: what the request's prompt lacked when it was opened, or the next piece of it.
        more: further entries of the payload (see `wire.handoff`).
    """

    stage: str
    track: tuple[int, ...]
    last: bool
    prompt: tuple[int, ...] = ()
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Feed:
    """Give a streaming stage the next part of its input; it answers each part and keeps what the next one needs.

    Attributes:
        part: counts from 0; 0 begins the stream, also once more after the stage was lost.
        prompt: token ids of the part; may be empty.
        pooling: fields of vLLM `PoolingParams`.
        last: no part follows.
    """

    stage: str
    part: int
    prompt: list[int]
    pooling: Mapping[str, Any]
    last: bool


@dataclass(frozen=True, slots=True)
class Repeat:
    """Have the text stage read its prompt once more, for what it exports: that comes as payloads, without tokens."""

    stage: str


@dataclass(frozen=True, slots=True)
class Emit:
    """Give the client a piece of a non-text answer.

    Attributes:
        modality: e.g. "audio".
        data: the piece (for sound: float32 samples).
        facts: what belongs to it (sample rate, frames, ...).
        last: nothing of this modality follows.
    """

    modality: str
    data: Any
    facts: Mapping[str, Any] = field(default_factory=dict)
    last: bool = True


@dataclass(frozen=True, slots=True)
class Fail:
    """End the request everywhere with an error for the client."""

    message: str


@dataclass(frozen=True, slots=True)
class Finished:
    """Nothing more will come of this request: what it still holds beyond the text stage is released."""


Action = Open | Extend | Feed | Repeat | Emit | Fail | Finished


class Flow(Protocol):
    """One request's way through the stages after the text stage."""

    def begin(self) -> list[Action]:
        """Decide what can be done as soon as the text stage has been given the request."""

    def handle(self, event: Produced) -> list[Action]:
        """Decide what follows from an event."""

    def replay(self, stage: str) -> list[Action]:
        """What opens the request again in a stage that lost it, from everything known so far."""
