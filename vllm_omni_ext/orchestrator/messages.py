"""Events that the request machine handles, and effects that it returns. Pure data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import msgspec

from vllm_omni_ext.errors import OmniError
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.observability.request_trace import RequestTrace
from vllm_omni_ext.plugins.flow import Action, Extend, Finish, Flow, Open, Submit
from vllm_omni_ext.plugins.runtime import RequestOptions

Scope: TypeAlias = tuple[Any, str | None]
"""(LoRA adapter, cache salt) of a client's request; the machine reads neither."""


class Event(msgspec.Struct, frozen=True):
    """Base class of events. Creating a Struct takes a tenth of the time of a frozen dataclass."""


class Effect(msgspec.Struct, frozen=True):
    """Base class of effects, which the orchestrator executes."""


@dataclass(frozen=True, kw_only=True)
class ClientRequest:
    """The engine request that vLLM made from a client's request, for the frontend (the stage of vLLM's text output).

    Attributes:
        request: vLLM's `EngineCoreRequest`; the machine does not read it.
        can_split: a prefill stage may compute the prompt.
        can_resume: another replica can continue from the prompt and the generated tokens.
        session: id of a session; its requests are sent to the same replica unless that replica's load is too high.
        media: cache keys of the media items; placement prefers a replica that has processed them before.
    """

    request: Any
    can_split: bool = True
    can_resume: bool = True
    session: str | None = None
    media: tuple[str, ...] = ()


# -- events -----------------------------------------------------------------------------------------------------


class Opened(Event, frozen=True, kw_only=True):
    """A planned request was submitted (`Admission.start`).

    Attributes:
        request_id: unique among all requests.
        external_id: the caller's id of the request.
        sink: the queue from which the caller reads chunks and errors; the machine does not read it.
        client: the client's request for the frontend; None if the request does not use the frontend.
        scope: for requests that the flow opens in the frontend.
        actions: the result of `flow.begin()`, if that was called already.
        budgets: largest number of tokens that a stage may generate, by stage.
        arrival: Unix time, seconds.
        priority: the request's priority in every stage; the lowest is scheduled first.
        watch: called with the `RequestTrace` of the request.
    """

    request_id: str
    external_id: str
    flow: Flow
    options: RequestOptions
    sink: Any = None
    client: ClientRequest | None = None
    scope: Scope = (None, None)
    actions: tuple[Action, ...] | None = None
    budgets: Mapping[str, int] = {}
    arrival: float = 0.0
    priority: int = 0
    trace_headers: Mapping[str, str] | None = None
    watch: Callable[[RequestTrace], None] | None = None


class Output(Event, frozen=True, kw_only=True):
    """An engine returned an output.

    Attributes:
        engine_id: the engine's id of the request.
        payload: the message or the decoded data in the output's tensor; None without a tensor.
        hidden_states: (address of the replica's store, name) of hidden states that the replica has stored; None if the
            output reports none.
        kv: transfer parameters of the finished prompt's KV cache, if the engine keeps that cache.
        stream_lost: the stage has dropped the state of the stream to which the part belongs (`StageError.lost`).
        waited_s: time in the engine's queue, in seconds, if the output reports it (the first one does, unless it has
            only hidden states).
        cached: prompt tokens that the engine had in its prefix cache, if the output reports it (as for `waited_s`).
    """

    replica: ReplicaId
    engine_id: str
    tokens: tuple[int, ...] = ()
    payload: Any = None
    finish: Finish | None = None
    hidden_states: tuple[str, str] | None = None
    kv: Mapping[str, Any] | None = None
    stream_lost: bool = False
    waited_s: float | None = None
    cached: int | None = None


class TextStopped(Event, frozen=True):
    """The API server found a stop string in the text: the request ends in the frontend, other stages continue."""

    request_id: str


class TextOnly(Event, frozen=True):
    """The client needs only the text from now on: the request ends in all stages but the frontend."""

    request_id: str


class Aborted(Event, frozen=True):
    """The caller aborts the request, which ends in all stages. Unknown ids are ignored."""

    request_id: str


class SendFailed(Event, frozen=True):
    """A message for a stage could not be built or sent."""

    request_id: str
    stage: str
    error: Exception


class ReplicaAnnounced(Event, frozen=True):
    """A replica is starting or may come back, so requests of its stage may wait.

    Attributes:
        coming: False: the replica is expected no longer.
    """

    replica: ReplicaId
    coming: bool = True


class ReplicaUp(Event, frozen=True):
    """A replica accepts requests, for the first time or again."""

    replica: ReplicaId


class ReplicaLost(Event, frozen=True):
    """A replica has ended or stopped answering: other replicas take over its requests.

    Attributes:
        ended: the process has ended, so that its requests are suspects (see `placement`); False: it does not answer.
    """

    replica: ReplicaId
    reason: str
    ended: bool = True


class ReplicaEnded(Event, frozen=True):
    """The process of a lost replica, which had stopped answering, has ended: its requests are suspects now."""

    replica: ReplicaId
    reason: str


class NeverUp(Event, frozen=True):
    """An announced replica will not start."""

    replica: ReplicaId
    reason: str


class PoolsChanged(Event, frozen=True):
    """The replicas that take requests may have changed: one was woken, or the coordinator reports other states."""


class DeadlinePassed(Event, frozen=True):
    """The time `RequestMachine.deadline` has passed."""


# -- effects ----------------------------------------------------------------------------------------------------

Side = Literal["whole", "prefill", "decode"]
"""The work of a stage for a prompt. "whole": the stage does prefill and decode. "prefill": the stage computes only the
prompt. "decode": the stage fetches the prompt's KV cache, and decodes."""


class ToReplica(Effect, frozen=True):
    """Base class of messages to a replica."""

    replica: ReplicaId


class Send(ToReplica, frozen=True):
    """Base class of messages to a replica that become an `EngineCoreRequest`.

    Attributes:
        request_id: id of the request in this API server.
        engine_id: id of the request in the engine.
    """

    request_id: str
    engine_id: str


class SendPrompt(Send, frozen=True, kw_only=True):
    """Send the client's request to the frontend, or to its prefill stage.

    Attributes:
        tokens: the tokens generated so far; the stage continues after them.
        recompute: the prompt is computed again, to export its hidden states again.
        kv: for the side "decode", the transfer parameters of the prompt's KV cache.
    """

    request: Any
    side: Side = "whole"
    tokens: tuple[int, ...] = ()
    recompute: bool = False
    kv: Mapping[str, Any] | None = None


class SendOpen(Send, frozen=True, kw_only=True):
    """Open a request in a stage.

    Attributes:
        budget: most tokens that the stage may generate; None: the stage's own limit.
        side: the stage's work; "whole" for a stage without prefill and decode replicas.
        kv: for the side "decode", the transfer parameters of the prompt's KV cache.
        scope: that of the client's request, if the stage is the frontend.
    """

    action: Open
    params: Any = None
    budget: int | None = None
    priority: int = 0
    scope: Scope = (None, None)
    side: Side = "whole"
    kv: Mapping[str, Any] | None = None


class SendChunk(Send, frozen=True, kw_only=True):
    """Send one more chunk of input to a stage in which the request is open."""

    action: Extend


class SendPart(Send, frozen=True, kw_only=True):
    """Send one part of a stream (see `plugins.flow.Submit`).

    Attributes:
        stream: the stream's name in engines, unique for each attempt (`Binding.stream`).
    """

    stream: str
    action: Submit
    params: Any = None
    priority: int = 0


class SendStreamEnd(Send, frozen=True, kw_only=True):
    """End a stream early, so that the stage frees the stream's state. Without effect if the stream has ended.

    Attributes:
        stream: the stream's name in engines, unique for each attempt (`Binding.stream`).
        action: the latest part that was sent; it supplies the stage and the kind of request, and is not sent again.
    """

    stream: str
    action: Submit
    priority: int = 0


class SendKVRelease(Send, frozen=True, kw_only=True):
    """Make a decode replica send a prefill replica the release of a KV cache that no replica will fetch.

    Attributes:
        kv: transfer parameters of the KV cache.
    """

    kv: Mapping[str, Any]


class AbortEngineRequests(ToReplica, frozen=True):
    """Abort engine requests on a replica."""

    engine_ids: tuple[str, ...]


class FreeHiddenStates(ToReplica, frozen=True):
    """Free stored hidden states on a replica, because no stage will read them any more.

    Attributes:
        name: name of the hidden states in the replica's connector.
    """

    name: str


class Accept(Effect, frozen=True):
    """The output that is being handled belongs to a request; without this effect the output is dropped.

    Attributes:
        name: id of the request in this API server; for a second computation of its prompt, that computation's name.
        to_client: vLLM's output processor receives the output, with `name` as its request id.
    """

    name: str
    to_client: bool = False


class ToCaller(Effect, frozen=True):
    """Put an item into the caller's queue: an output chunk, or `END` after the last chunk."""

    sink: Any
    item: Any


class FailRequest(Effect, frozen=True):
    """Send the caller an error; the machine has removed the request already."""

    request_id: str
    stage: str
    error: OmniError
    sink: Any


END = "end"
"""Item that is put into the caller's queue after the last chunk of the flow."""
