"""The state of one request in the request machine, and the interface for observers of requests. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_omni_ext.disaggregation.parameters import SHORTEST_PROMPT
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.modalities.base import OutputChunk
from vllm_omni_ext.observability.request_trace import Outcome, RequestTrace
from vllm_omni_ext.orchestrator.messages import ClientRequest, Opened, Output, Scope, Send, SendOpen, SendPrompt, Side
from vllm_omni_ext.plugins.flow import Flow, Open, Submit
from vllm_omni_ext.plugins.runtime import RequestOptions

REMEMBERED_EVENTS = 16
"""Number of a request's last events that are kept, and logged with its error."""


@dataclass(eq=False, slots=True)
class Binding:
    """The state of one request in one stage: its replica, engine requests and waits.

    Attributes:
        stage: the stage's name in the plan.
        name: the request's name in this stage; also its engine id if the stage has one engine request for it.
        replica: the replica that has the request; None while it waits for a replica, and after the stage has ended it.
        engine_ids: ids of its engine requests on the replica -> the part of a stream (`Submit`) that each contains;
            None for a request without streams.
        waiting_since: time since which the request waits for a replica; None: it does not wait.
        source: the stage that its input comes from; None: the client.
        input_due_since: time of its last input while more input is due; None: no input is due.
        replays: number of failovers.
        stream_name: name of its stream in the flow (`Submit.stream`).
        streams: number of attempts of its stream: a failover starts another one.
        part: the latest part that was sent to the open stream; None if no stream is open.
        losses: number of replicas that were lost while they had the request, by stage of the plan.
        trial: number of further outputs after which the request's trial as a suspect ends (see `placement`); -1: it
            ends when the stage has ended the request. None: the request is not on trial.
    """

    state: RequestState
    stage: str
    name: str
    replica: ReplicaId | None = None
    engine_ids: dict[str, Submit | None] = field(default_factory=dict)
    waiting_since: float | None = None
    source: str | None = None
    input_due_since: float | None = None
    replays: int = 0
    stream_name: str = ""
    streams: int = 0
    part: Submit | None = None
    losses: dict[str, int] = field(default_factory=dict)
    trial: int | None = None

    @property
    def stream(self) -> str:
        """Name that the stream's latest attempt has in engines."""
        return f"{self.name}/{self.streams - 1}"


@dataclass(frozen=True, slots=True)
class KVCache:
    """The KV cache of a prompt that a prefill replica has computed.

    Attributes:
        holder: the replica that stores it.
        transfer: the transfer parameters for the replica that fetches it.
    """

    holder: ReplicaId
    transfer: Mapping[str, Any]


@dataclass(eq=False, slots=True)
class Routed(Binding):
    """A prompt that `PromptRouter` sends to the frontend, or to its prefill stage first.

    Attributes:
        attempts: number of engine requests that were built for it.
        kv: the KV cache that the frontend may still have to fetch; None after the frontend's first output.
        handed: (number of the message, time, replica) of the message that gave the frontend `kv` to fetch; None before
            that message, and after the frontend's first output.
    """

    attempts: int = 0
    kv: KVCache | None = None
    handed: tuple[int, float, ReplicaId] | None = None

    @property
    def trace(self) -> RequestTrace | None:
        """Return the trace in which the observer records times and tokens of this prompt; None: not recorded."""
        return self.state.trace

    @property
    def content(self) -> Any:
        """Return the data that another stage sends with the prompt, for the observer; None for the client's prompt."""
        return None

    @property
    def can_split(self) -> bool:
        """Return whether a prefill stage may compute the prompt."""
        raise NotImplementedError

    def message(self, replica: ReplicaId, engine_id: str, side: Side, kv: Mapping[str, Any] | None) -> Send:
        """Return the message that sends the prompt to a replica.

        Args:
            engine_id: id of the request in the replica's engine.
            side: the work of the replica for the prompt.
            kv: transfer parameters of the prompt's KV cache; None unless `side` is "decode".
        """
        raise NotImplementedError


@dataclass(eq=False, slots=True)
class Prompt(Routed):
    """The client's request in the frontend, or a second computation of its prompt (`plugins.flow.Recompute`).

    Attributes:
        recompute: the prompt is computed again, to export its hidden states again.
        tokens: token ids that were generated so far.
    """

    recompute: bool = False
    tokens: list[int] = field(default_factory=list)

    @property
    def trace(self) -> RequestTrace | None:
        """Return the `RequestTrace` to which the observer adds this prompt; None for a recomputation."""
        return None if self.recompute else self.state.trace

    @property
    def can_split(self) -> bool:
        """Return whether a prefill stage may compute the prompt."""
        assert self.state.client is not None
        return self.state.client.can_split

    def message(self, replica: ReplicaId, engine_id: str, side: Side, kv: Mapping[str, Any] | None) -> Send:
        """Return the message that sends the client's request to a replica; arguments as in `Routed.message`."""
        assert self.state.client is not None
        return SendPrompt(
            replica,
            self.state.request_id,
            engine_id,
            request=self.state.client.request,
            side=side,
            tokens=tuple(self.tokens),
            recompute=self.recompute,
            kv=kv,
        )


@dataclass(eq=False, slots=True)
class FlowPrompt(Routed):
    """A request that the flow opens itself (`plugins.flow.Open`) in a frontend with separate prefill and decode stages.

    Attributes:
        action: the flow's last `Open`.
        params: parameters of the request; None: the stage's defaults.
        budget: most tokens that the stage may generate; None: the stage's own limit.
    """

    action: Open | None = None
    params: Any = None
    budget: int | None = None

    @property
    def content(self) -> Any:
        """Return the data that another stage sends with the prompt."""
        assert self.action is not None
        return self.action.payload or self.action.prompt

    @property
    def can_split(self) -> bool:
        """Return whether a prefill stage may compute the prompt: see `engine_requests.can_be_split`."""
        action, params = self.action, self.params
        assert action is not None
        uncached = getattr(params, "skip_reading_prefix_cache", None) and not action.export
        return (
            len(action.prompt) >= SHORTEST_PROMPT
            and all(stop <= len(action.prompt) for _, stop in action.export)
            and getattr(params, "prompt_logprobs", None) is None
            and not uncached
        )

    def message(self, replica: ReplicaId, engine_id: str, side: Side, kv: Mapping[str, Any] | None) -> Send:
        """Return the message that opens the request in a replica; arguments as in `Routed.message`."""
        assert self.action is not None
        return SendOpen(
            replica,
            self.state.request_id,
            engine_id,
            action=self.action,
            params=self.params,
            budget=self.budget,
            priority=self.state.priority,
            scope=self.state.scope,
            side=side,
            kv=kv,
        )


@dataclass(eq=False, slots=True)
class RequestState:
    """The state of one request in all stages.

    Attributes:
        sink: queue from which the caller reads chunks and errors; None if it reads none.
        scope: for requests that the flow opens in the frontend.
        budgets: largest number of tokens that a stage may generate, by stage.
        bindings: state of the request in each stage that the flow has opened, by (stage, name of the stream or "").
        prompts: the client's own request in the frontend, and recomputations of its prompt, by name.
        forwarded: the flow sends the client's request to the frontend.
        stages_seen: stages that have returned an output for the request.
        done: stages that have finished the request.
        open_outputs: outputs of the flow whose last chunk is missing.
        hidden_states: (replica, address of the producer, name) of hidden states that replicas store for it.
        announced: `Open.hidden_states` or `Extend.hidden_states` that was sent to a stage last; None: none was.
        recomputations: number of recomputations of the client's prompt so far.
        finished: the flow has ended; only the frontend may still generate text.
        trace: the observer's record of the request; None if the request is not observed, or its end is recorded.
        history: the request's last events, for the log (`history_text`).
    """

    request_id: str
    external_id: str
    flow: Flow
    options: RequestOptions
    sink: Any
    client: ClientRequest | None
    scope: Scope
    budgets: Mapping[str, int]
    priority: int
    open_outputs: set[str]
    bindings: dict[tuple[str, str], Binding] = field(default_factory=dict)
    prompts: dict[str, Prompt] = field(default_factory=dict)
    stages_seen: set[str] = field(default_factory=set)
    done: set[str] = field(default_factory=set)
    hidden_states: set[tuple[ReplicaId, str, str]] = field(default_factory=set)
    announced: Any = None
    recomputations: int = 0
    forwarded: bool = False
    finished: bool = False
    trace: RequestTrace | None = None
    history: deque[tuple[Any, ...]] = field(default_factory=lambda: deque(maxlen=REMEMBERED_EVENTS))

    @classmethod
    def of(cls, event: Opened) -> RequestState:
        """Return the initial state of a request."""
        return cls(
            request_id=event.request_id,
            external_id=event.external_id,
            flow=event.flow,
            options=event.options,
            sink=event.sink,
            client=event.client,
            scope=event.scope,
            budgets=event.budgets,
            priority=event.priority,
            open_outputs=set(event.flow.outputs),
        )

    def __iter__(self) -> Iterator[Binding]:
        """Iterate over the request's bindings in all stages, prompts included."""
        yield from self.bindings.values()
        yield from self.prompts.values()

    @property
    def waits(self) -> bool:
        """Whether the request waits for a replica in any stage."""
        return any(binding.waiting_since is not None for binding in self)

    def history_text(self) -> str:
        """Return the request's last events as text for the log."""
        return f"request {self.external_id}, last events: " + "; ".join(
            " ".join(str(word) for word in entry if word is not None and word != "") for entry in self.history
        )


class RequestObserver:
    """Base class of observers, whose methods the request machine calls. This class records nothing.

    `observability.observer.Observer` is the subclass for metrics and traces. All methods ignore a `trace` of None.
    """

    def opened(self, event: Opened) -> RequestTrace | None:
        """Record a new request; return its record, which is passed to all later calls as `trace`, or None."""
        return None

    def sent(self, trace: RequestTrace | None, source: str | None, replica: ReplicaId, payload: Any = None) -> None:
        """Record that the request, or a chunk of it, is sent from stage `source` (None: the client) to a replica."""

    def produced(self, trace: RequestTrace | None, output: Output) -> None:
        """Record an output of a stage."""

    def emitted(self, trace: RequestTrace | None, stage: str, chunk: OutputChunk) -> None:
        """Record a chunk that is sent to the client; `stage` is "" before any stage has returned an output."""

    def failed(self, trace: RequestTrace | None, stage: str, error: Exception) -> None:
        """Record that the request has failed in a stage, and so has ended."""

    def ended(self, trace: RequestTrace | None, outcome: Outcome) -> None:
        """Record the end of a request that has not failed, with its outcome; called once."""

    def waiting(self, stage: str, requests: int) -> None:
        """Record the number of requests that now wait for a replica of a stage."""

    def taken_over(self, stage: str) -> None:
        """Record that a request continues after its replica of a stage was lost."""

    def fetched(self, source: str, target: str, seconds: float) -> None:
        """Record that stage `target` has fetched a KV cache of stage `source`.

        Args:
            seconds: time from sending the request to `target` until its first output.
        """

    def local_prefill(self, stage: str) -> None:
        """Record that the decode stage `stage` computes a prompt itself, without a prefill replica."""
