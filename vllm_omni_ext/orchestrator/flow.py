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
    """

    stage: str
    tokens: tuple[int, ...] = ()
    payload: Any = None
    finish: Finish | None = None


@dataclass(frozen=True, slots=True)
class Open:
    """Open the request in a stage.

    Attributes:
        prompt: token ids as the stage's engine counts them.
        handoff: payload for a fed stage (see `wire.handoff`); None for a one-shot stage.
        pooling: fields of vLLM `PoolingParams` for a one-shot stage; None for a fed one.
        rows: tensor rows that belong to the prompt.
        stop: token ids that end the request in that stage.
        done: how many tokens at the end of `prompt` this stage has made already (before it was lost).
    """

    stage: str
    prompt: list[int]
    handoff: Mapping[str, Any] | None = None
    pooling: Mapping[str, Any] | None = None
    rows: Any = None
    stop: tuple[int, ...] = ()
    done: int = 0


@dataclass(frozen=True, slots=True)
class Extend:
    """Hand one more chunk to a stage in which the request is open."""

    stage: str
    track: tuple[int, ...]
    last: bool
    rows: Any = None


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
    """Nothing more will come of this request; everything it holds is released."""


Action = Open | Extend | Emit | Fail | Finished


class Flow(Protocol):
    """One request's way through the stages after the text stage."""

    def handle(self, event: Produced) -> list[Action]:
        """Decide what follows from an event."""

    def replay(self, stage: str) -> list[Action]:
        """What opens the request again in a stage that lost it, from everything known so far."""
