"""Events that the request machine handles, and effects that it returns. Pure data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from vllm_omni_ext.errors import OmniError
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.observability.request_trace import RequestTrace
from vllm_omni_ext.plugins.flow import Action, Extend, Finish, Flow, Open, Submit
from vllm_omni_ext.plugins.runtime import RequestOptions


class Event(msgspec.Struct, frozen=True):
    """Base of the events. A Struct is created ten times faster than a frozen dataclass."""


class Effect(msgspec.Struct, frozen=True):
    """Base of the effects."""


@dataclass(frozen=True, kw_only=True)
class ClientRequest:
    """The client's own engine request, for the frontend.

    Attributes:
        request: vLLM's `EngineCoreRequest`; the machine does not read it.
        can_split: a prefill stage may compute the prompt.
        can_resume: another replica can continue from the prompt and the tokens; False if the request has more state.
        session: requests of one session go to the same replica, as far as its load allows.
        media: cache keys of the media items; placement prefers a replica that has processed them before.
    """

    request: Any
    can_split: bool = True
    can_resume: bool = True
    session: str | None = None
    media: tuple[str, ...] = ()


# -- events -----------------------------------------------------------------------------------------------------


class Opened(Event, frozen=True, kw_only=True):
    """A planned request begins.

    Attributes:
        request_id: unique among all requests.
        external_id: the caller's id of the request.
        sink: the queue from which the caller reads chunks and errors; the machine does not read it.
        client: the client's request for the frontend; None if the request does not use the frontend.
        actions: the result of `flow.begin()`, if that was called already.
        budgets: largest number of tokens that a stage may generate, by stage.
        arrival: Unix time, seconds.
        watch: called with the observer's record of the request.
    """

    request_id: str
    external_id: str
    flow: Flow
    options: RequestOptions
    sink: Any = None
    client: ClientRequest | None = None
    actions: tuple[Action, ...] | None = None
    budgets: Mapping[str, int] = {}
    arrival: float = 0.0
    trace_headers: Mapping[str, str] | None = None
    watch: Callable[[RequestTrace], None] | None = None


class Output(Event, frozen=True, kw_only=True):
    """An engine returned an output.

    Attributes:
        engine_id: the engine's id of the request.
        payload: the decoded tensor of the output.
        hidden_states: (address of the producer, name) of hidden states that the replica stores, if the output reports
            any.
        kv: transfer parameters of the finished prompt's KV cache, if the engine keeps that cache.
        queued_s: time in the engine's queue, in seconds, if the output reports it (the first one does).
    """

    replica: ReplicaId
    engine_id: str
    tokens: tuple[int, ...] = ()
    payload: Any = None
    finish: Finish | None = None
    hidden_states: tuple[str, str] | None = None
    kv: Mapping[str, Any] | None = None
    queued_s: float | None = None


class TextStopped(Event, frozen=True):
    """The API server found a stop string in the text: the frontend must stop, the other stages go on."""

    request_id: str


class TextOnly(Event, frozen=True):
    """The client gets no more of the outputs other than the text: their stages end, the text goes on."""

    request_id: str


class Aborted(Event, frozen=True):
    """The caller has gone: the request ends. Unknown ids are ignored."""

    request_id: str


class SendFailed(Event, frozen=True):
    """A message for a stage could not be built or sent."""

    request_id: str
    stage: str
    error: Exception


class ReplicaAnnounced(Event, frozen=True):
    """A replica is starting, or may come back; with `coming=False`, that wait has ended, with or without a replica."""

    replica: ReplicaId
    coming: bool = True


class ReplicaUp(Event, frozen=True):
    """A replica accepts requests, for the first time or again."""

    replica: ReplicaId


class ReplicaLost(Event, frozen=True):
    """A replica has ended or stopped answering: other replicas take over its requests.

    Attributes:
        ended: its process has ended, perhaps because of a request.
    """

    replica: ReplicaId
    reason: str
    ended: bool = True


class ReplicaEnded(Event, frozen=True):
    """The process of a replica that was lost because it did not answer has ended, perhaps because of a request."""

    replica: ReplicaId
    reason: str


class NeverUp(Event, frozen=True):
    """A replica that was announced will not start."""

    replica: ReplicaId
    reason: str


class DeadlinePassed(Event, frozen=True):
    """`RequestMachine.deadline` has passed."""


# -- effects ----------------------------------------------------------------------------------------------------


class ToReplica(Effect, frozen=True):
    """Base of the messages to a replica."""

    replica: ReplicaId


class Send(ToReplica, frozen=True):
    """Base of the messages to a replica about one request."""

    request_id: str
    engine_id: str


class SendPrompt(Send, frozen=True, kw_only=True):
    """The client's request to the frontend, or to the stage that computes the prompt.

    Attributes:
        side: "whole": the stage does prefill and decode. "prefill": the prompt only. "decode": the answer only, with
            `kv`.
        tokens: the tokens generated so far; the stage continues after them.
        recompute: the prompt is computed again, to export its hidden states again.
    """

    request: Any
    side: Literal["whole", "prefill", "decode"] = "whole"
    tokens: tuple[int, ...] = ()
    recompute: bool = False
    kv: Mapping[str, Any] | None = None


class SendOpen(Send, frozen=True, kw_only=True):
    """A request to a stage. `budget`: largest number of tokens the stage may generate; None: the stage's own limit."""

    action: Open
    params: Any = None
    budget: int | None = None


class SendChunk(Send, frozen=True, kw_only=True):
    """One more chunk of a request that is open in a stage."""

    action: Extend


class SendPart(Send, frozen=True, kw_only=True):
    """One part of a stream."""

    stream: str
    action: Submit
    params: Any = None


class SendStreamEnd(Send, frozen=True, kw_only=True):
    """A stage must free a stream. `action` is the last part that was sent."""

    stream: str
    action: Submit


class SendKVRelease(Send, frozen=True, kw_only=True):
    """A replica that fetches KV caches must have one freed at its source, because no replica will fetch it."""

    kv: Mapping[str, Any]


class AbortEngineRequests(ToReplica, frozen=True):
    """A replica must end engine requests."""

    engine_ids: tuple[str, ...]


class FreeHiddenStates(ToReplica, frozen=True):
    """A replica must free hidden states that no stage will take."""

    name: str


class Accept(Effect, frozen=True):
    """The output is valid.

    Attributes:
        name: the request's name.
        to_client: vLLM's output processor receives the output, under that name.
    """

    name: str
    to_client: bool = False


class ToCaller(Effect, frozen=True):
    """An output chunk for the caller, or `END` after the last chunk."""

    sink: Any
    item: Any


class FailRequest(Effect, frozen=True):
    """The caller gets an error; the request state is gone."""

    request_id: str
    stage: str
    error: OmniError
    sink: Any


END = "end"
"""The caller of a request receives this after the last chunk of the flow."""
