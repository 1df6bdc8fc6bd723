"""The flow of a request: takes stage outputs, returns actions. Pure: no vLLM, no torch, no sockets, no clock.

A plugin implements `Flow` for each kind of request. The orchestrator passes stage outputs to the flow and executes the
actions that the flow returns. The orchestrator handles order, routing, failover, deadlines and abort; a flow
returns actions and never waits. Tensors pass through as opaque objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import msgspec

from vllm_omni_ext.modalities.base import OutputChunk

Finish = Literal["stop", "length", "abort", "error", "repetition"]
FAILURES = (400, 500, 503)
"""Values of `Fail.status`."""


@dataclass(slots=True)  # not frozen: each step of each request creates one, and a frozen one takes twice as long
class Produced:
    """The output of one engine step of a stage for this request, or with `Open.group` of several successive steps.

    Attributes:
        stage: name of the stage in the model's pipeline.
        tokens: new token ids.
        payload: `wire.envelope.StageError` if the stage could not serve its input; a message of the core (e.g.
            `HiddenStatesChunkReady`); else the output's tensor as decoded by `ModelRuntime.decode`; None without a
            tensor.
        finish: the reason that the request (or the part of a stream) has ended in the stage; None while it continues.
        part: the part of a stream that this output belongs to (see `Submit`); None for other stages.
        stream: name of that stream (see `Submit`).
        at: time of the output, in seconds of a monotonic clock.
        load: estimated number of requests on the replica that made the output, this one included; 0 for the frontend.
    """

    stage: str
    tokens: tuple[int, ...] = ()
    payload: Any = None
    finish: Finish | None = None
    part: int | None = None
    at: float = field(default=0.0, compare=False)
    load: float = field(default=0.0, compare=False)
    stream: str = ""


@dataclass(frozen=True, slots=True)
class Forward:
    """Send the client's own engine request to the frontend; its tokens become vLLM's text output.

    After the loss of a replica, the core resumes the request on another one without calling `Flow.replay`.
    """

    stage: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """Open the request in a stage that accepts requests or chunks.

    Attributes:
        prompt: token ids, one for each prompt position of the stage's engine.
        payload: the plugin's message for the stage's worker.
        last: no `Extend` follows.
        prompt_positions: number of leading prompt positions whose input is in this message; None = all of them.
        step_inputs: number of positions after the prompt whose input is in this message. A stage that accepts chunks
            samples only as far as its inputs reach. After the last input it samples until its end.
        hidden_spans: ranges [start, stop) of prompt positions whose input is hidden states of another stage.
        hidden_states: location of the hidden states that exist already (`wire.stage_input.HiddenStatesRef`).
        done: number of tokens at the end of `prompt` that the stage generated before its replica was lost.
        prefix_keys: keys of the prompt's beginnings of `wire.stage_input.KEY_POSITIONS` positions, twice as many, and
            so on. Two prompts have the same key only if the inputs of all these positions are equal. A stage that
            accepts chunks uses them as keys of its prefix cache. Without them the prompt is computed and not cached.
            The inputs of these positions are in this message or are hidden states.
        stop: token ids that end the request in that stage, with those of `params`; ids that end a text do not end it.
        params: parameters of this request; None = the request's options over the stage's defaults.
        features: vLLM `MultiModalFeatureSpec`s of the prompt.
        export: ranges [start, stop) of positions whose hidden states the stage exports (`wire.stage_input.OPEN_END`).
        group: largest number of tokens in an output of a stage that accepts chunks. The engine then joins the outputs
            of successive steps: `Produced.tokens` has the tokens of all, and the tensors are joined along dimension 0.
            1: each step has an output.
        rate: tokens per second that the consumer of the outputs uses from the first token on; 0: unknown. With a rate,
            the engine joins outputs only while the consumer has tokens for longer than the joined steps take.

    Raises:
        ValueError: `group` is below 1, or `rate` below 0.
    """

    stage: str
    prompt: list[int]
    payload: msgspec.Struct | None = None
    last: bool = True
    prompt_positions: int | None = None
    step_inputs: int = 0
    hidden_spans: Sequence[tuple[int, int]] = ()
    hidden_states: Any = None
    done: int = 0
    prefix_keys: Sequence[bytes] = ()
    stop: tuple[int, ...] = ()
    params: Any = None
    features: Sequence[Any] = ()
    export: Sequence[tuple[int, int]] = ()
    group: int = 1
    rate: float = 0.0

    def __post_init__(self) -> None:
        if self.group < 1:
            raise ValueError(f"group: must be at least 1, got {self.group}")
        if self.rate < 0:
            raise ValueError(f"rate: must not be negative, got {self.rate}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Extend:
    """Send one more chunk to a stage in which the request is open.

    Attributes:
        payload: the plugin's message for the stage's worker.
        last: no further chunk follows.
        prompt_positions: number of additional prompt positions whose input comes with this chunk.
        step_inputs: number of additional positions after the prompt whose input comes with this chunk.
        hidden_states: location and current number of the prompt's hidden states (`wire.stage_input.HiddenStatesRef`).
    """

    stage: str
    payload: msgspec.Struct | None = None
    last: bool = False
    prompt_positions: int = 0
    step_inputs: int = 0
    hidden_states: Any = None


@dataclass(slots=True, kw_only=True)  # not frozen, see `Produced`
class Submit:
    """Send the next part of a stream to a stage that accepts parts.

    A stage may return several outputs for a part; the last one has a finish reason. The stage keeps state between the
    parts of a stream, so all parts are sent to the same replica.

    A part may be submitted before the stage has answered the part before it. A request may have several streams in a
    stage, which may be on different replicas; their flow implements `StreamsFlow`.

    Attributes:
        stream: name of the stream in this request and stage; "" = the only one.
        part: number of the part in the stream. Part 0 starts the stream, also after the loss of its replica.
        prompt: token ids of the part; may be empty.
        payload: the plugin's message for the stage.
        last: no part follows.
        pooling_task: vLLM's task of a pooling stage; None = the stage takes sampling parameters.
        due: time at which the output is needed, on the clock of `Produced.at`; not earlier than that of the part
            before. None = now. A stage with `scheduling_policy: priority` schedules the earliest `due` first.
        params: parameters of this request; None = the request's options over the stage's defaults.
        features: vLLM `MultiModalFeatureSpec`s of the prompt.
    """

    stage: str
    stream: str = ""
    part: int = 0
    prompt: Sequence[int] = ()
    payload: msgspec.Struct | None = None
    last: bool = True
    pooling_task: str | None = None
    due: float | None = field(default=None, compare=False)
    params: Any = None
    features: Sequence[Any] = ()


@dataclass(frozen=True, slots=True)
class Recompute:
    """Compute the prompt of a forwarded request again, so that the stage exports its hidden states again.

    The outputs of this computation have payloads, and no tokens.

    Attributes:
        tokens: ids of generated tokens, which are computed after the prompt.
    """

    stage: str
    tokens: tuple[int, ...] = ()


@dataclass(slots=True)  # not frozen, see `Produced`
class Emit:
    """Send an output chunk to the client; `chunk.last` ends the output of this modality."""

    chunk: OutputChunk


@dataclass(frozen=True, slots=True)
class Progress:
    """Report a stage's progress to the client: `done` of `total` steps."""

    stage: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Close:
    """End the request in one stage, which frees its state there; nothing happens if the stage has ended it already.

    Outputs that the stage makes meanwhile are dropped, also those of parts (`Submit`). A request that the flow has
    forwarded (`Forward`) cannot be closed.

    Attributes:
        stream: name of the stream to end (see `Submit`).
    """

    stage: str
    stream: str = ""


@dataclass(frozen=True, slots=True)
class Fail:
    """End the request in all stages, with an error for the client.

    Attributes:
        status: HTTP status. 400: the request is wrong, `LLM` raises RequestError. 500: the stage could not finish it,
            RequestFailed. 503: a later attempt may succeed, StageUnavailable.
        parameter: name of the wrong field, for status 400 only.

    Raises:
        ValueError: another status, or a parameter without status 400.
    """

    message: str
    status: Literal[400, 500, 503] = 500
    parameter: str = ""

    def __post_init__(self) -> None:
        if self.status not in FAILURES:
            raise ValueError(f"status: must be one of {', '.join(map(str, FAILURES))}, got {self.status}")
        if self.parameter and self.status != 400:
            raise ValueError(f"parameter: '{self.parameter}' needs status 400, got {self.status}")


@dataclass(frozen=True, slots=True)
class Finished:
    """End the flow: release the request's resources in all stages but the frontend."""


Action = Forward | Open | Extend | Submit | Recompute | Close | Emit | Progress | Fail | Finished


class Flow(Protocol):
    """The route of one request through the stages: turns outputs of stages into actions."""

    stages: frozenset[str]
    """Stages that the request may use. The request is refused, or fails, if one of these is unavailable."""

    outputs: frozenset[str]
    """Modalities of the answer: the flow ends when each has had its last chunk. The "text" of a forwarded request ends
    with vLLM's text output."""

    def begin(self) -> list[Action]:
        """Return the first actions of the request; called once."""

    def handle(self, event: Produced) -> list[Action]:
        """Return the actions that follow from an output of a stage."""

    def replay(self, stage: str) -> list[Action]:
        """Return the actions that open the request again in a stage whose replica was lost, with all input so far."""


class StreamsFlow(Flow, Protocol):
    """A flow with named streams (`Submit.stream`)."""

    def replay_stream(self, stage: str, stream: str) -> list[Action]:
        """Return the actions that restart a named stream whose replica was lost, with all input so far.

        For the stream "" the core calls `replay`.
        """


class ForwardFlow:
    """Flow of a request that only the frontend answers."""

    def __init__(self, frontend: str, output: str = "text") -> None:
        self.stages = frozenset((frontend,))
        self.outputs = frozenset((output,))
        self._frontend = frontend

    def begin(self) -> list[Action]:
        """Start the flow: send the client's request to the frontend stage."""
        return [Forward(self._frontend)]

    def handle(self, event: Produced) -> list[Action]:
        """Do nothing: the frontend's tokens go to the client."""
        return []

    def replay(self, stage: str) -> list[Action]:
        """Do nothing: the core resumes a forwarded request itself."""
        return []
