"""Validates and plans client requests, before the orchestrator starts them.

vLLM's handlers have no parameters for stages. `Admission` stores the options and the plan of a request in a `Ticket`
while vLLM's handlers process the request, and then starts the request's flow (`plugins.flow.Flow`) in the orchestrator.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreRequest

from vllm_omni_ext.config.checks import modality_names
from vllm_omni_ext.errors import RequestError
from vllm_omni_ext.modalities.base import TEXT
from vllm_omni_ext.observability.request_trace import RequestTrace
from vllm_omni_ext.orchestrator.engine_requests import client_request
from vllm_omni_ext.orchestrator.messages import Opened, Scope
from vllm_omni_ext.orchestrator.orchestrator import Orchestrator
from vllm_omni_ext.plugins.flow import Action, Forward, ForwardFlow
from vllm_omni_ext.plugins.runtime import ModelRuntime, Planned, Rendered, RequestOptions
from vllm_omni_ext.wire.stage_input import RESERVED, TICKET

TEXT_OPTIONS = {
    "stop": "stop",
    "logprobs": "logprobs",
    "prompt_logprobs": "prompt_logprobs",
    "response_format": "structured_outputs",
}
"""Request field -> attribute of `SamplingParams`, for fields that vLLM applies to the text of its output only."""

PRIORITY: ContextVar[int] = ContextVar("priority", default=0)
"""Priority of the current HTTP request, from vLLM's header; for requests whose API has no field of its own for it."""


@dataclass(kw_only=True)
class Ticket:
    """The options and the plan of a request, stored by `Admission` while vLLM's handlers process the request.

    Attributes:
        options: modalities and stage parameters that the client has chosen.
        all_text: every `RequestOutput` contains all text so far (`RequestOutputKind.CUMULATIVE`).
        watch: called with the `RequestTrace` of the request when it starts; with `n` answers, once for each.
        text_fields: names of the client's fields that only a text of the frontend can follow. `Admission.admit` refuses
            them if the flow forwards nothing to the frontend.
        priority: priority in every stage, for a request without an engine request of vLLM's handlers; the lowest is
            scheduled first.
        scope: for requests that the flow opens in the frontend.
        planned: the plan; None before `Admission.admit`.
        actions: the first actions of the flow, from `Flow.begin`.
        sink: the queue for the output chunks and errors of the request; None if only the frontend stage answers it.
        request_ids: ids, unique inside this API server, of the requests for the frontend; with `n` answers, `n`.
    """

    options: RequestOptions
    all_text: bool = False
    watch: Callable[[RequestTrace], None] | None = None
    text_fields: tuple[str, ...] = ()
    priority: int = 0
    scope: Scope = (None, None)
    planned: Planned | None = None
    actions: tuple[Action, ...] = ()
    sink: asyncio.Queue[Any] | None = None
    request_ids: list[str] = field(default_factory=list)

    @property
    def forwarded(self) -> bool:
        """Whether the flow sends the client's request to the frontend."""
        return any(isinstance(action, Forward) for action in self.actions)


class Admission:
    """Validates and plans client requests; one per API server.

    A `Ticket` is registered under a random key, which clients cannot guess. An HTTP handler puts the key into
    `extra_args[TICKET]`, and vLLM copies it to `AsyncOmni.generate`. That method plans the request, and registers the
    ticket again under a second key in `extra_args` of the engine request, which `open` reads.

    Args:
        model_frontend: name that flows use for the frontend, i.e. the stage that answers with vLLM's text output.
        default_modalities: modalities of a request that names none, comma-separated; None: the model's own default.
        max_media_tokens: most tokens of an image, a video or a sound; None: no limit.

    Raises:
        ConfigError: the model has no such modality.
    """

    def __init__(
        self,
        runtime: ModelRuntime,
        orchestrator: Orchestrator,
        model_frontend: str,
        *,
        default_modalities: str | None = None,
        max_media_tokens: int | None = None,
    ) -> None:
        self.capabilities = runtime.capabilities()
        if default_modalities is not None:
            named = modality_names(default_modalities, self.capabilities.modalities, "this model")
            self.capabilities = replace(self.capabilities, default_modalities=named)
        text_only = TEXT in self.capabilities.modalities
        self._runtime = runtime
        self._orchestrator = orchestrator
        self._frontend = model_frontend
        self._max_media_tokens = max_media_tokens
        self._default = RequestOptions(modalities=(TEXT,) if text_only else self.capabilities.default_modalities)
        self._tickets: dict[str, Ticket] = {}

    def held(self) -> int:
        """Return the number of registered tickets (0 when idle)."""
        return len(self._tickets)

    def _register(self, ticket: Ticket) -> str:
        key = uuid.uuid4().hex
        self._tickets[key] = ticket
        return key

    def expect(self, ticket: Ticket) -> str:
        """Register a ticket for a request that vLLM's handler will process; return its key for `extra_args[TICKET]`.

        Raises:
            RequestError: the options are invalid.
        """
        self._runtime.validate(ticket.options)
        return self._register(ticket)

    def withdraw(self, key: str) -> None:
        """Remove the ticket with this key; an unknown key is ignored."""
        self._tickets.pop(key, None)

    def ticket(self, params: Any, options: RequestOptions | None) -> Ticket:
        """Return the ticket of a request that is submitted, and remove the reserved keys from its `extra_args`.

        The ticket is a new one if `options` are given, else the one that `expect` has registered, else a new one with
        the default options. Stages read the reserved keys, so clients must not set them.

        Args:
            params: the request's vLLM parameters; may be None.

        Raises:
            RequestError: `options` are invalid.
        """
        extra = getattr(params, "extra_args", None) or {}
        key = extra.get(TICKET)
        announced = self._tickets.pop(key, None) if isinstance(key, str) else None
        if announced is not None and announced.all_text:
            params.output_kind = RequestOutputKind.CUMULATIVE
        if RESERVED & extra.keys():
            params.extra_args = {key: value for key, value in extra.items() if key not in RESERVED} or None
        if options is not None:
            self._runtime.validate(options)
            return Ticket(options=options)
        return announced or Ticket(options=self._default)

    def admit(
        self, ticket: Ticket, request: Rendered, *, answers: int = 1, params: SamplingParams | None = None
    ) -> None:
        """Check and plan a request, and store the plan in its ticket; called once per request.

        Args:
            request: the tokenized prompt.
            answers: number of answers (`n`).
            params: the client's parameters for the frontend stage; None if that stage has its own type of parameters,
                or if the request has no prompt for it.

        Raises:
            RequestError: the request cannot be served.
            StageUnavailable: a stage that the request needs has no live replica.
        """
        self._check_media(request)
        if params is not None:
            by_stage = {**ticket.options.params, self._frontend: params}
            ticket.options = replace(ticket.options, params=by_stage)
        planned = self._runtime.plan(request, ticket.options)
        self._orchestrator.require(planned.flow)
        alone, requested = isinstance(planned.flow, ForwardFlow), ", ".join(ticket.options.modalities)
        if answers != 1 and not alone:
            raise RequestError(f"n: must be 1 when {requested} is requested", parameter="n")
        ticket.planned, ticket.actions = planned, tuple(planned.flow.begin())
        if not ticket.forwarded:
            opened = params if self._frontend in planned.flow.stages else None
            for name in (*ticket.text_fields, *_text_options(opened)):
                message = f"{name}: is not available when {requested} is requested; leave it out"
                raise RequestError(message, parameter=name)
        ticket.sink = None if alone else asyncio.Queue()

    def refuse_unused(self, ticket: Ticket) -> None:
        """Refuse a planned request whose body has a field with parameters for a stage that the plan does not use.

        Raises:
            RequestError: the field, which is named after the stage, is its `parameter`.
        """
        assert ticket.planned is not None, "the request was admitted"
        for stage in sorted(ticket.options.named - ticket.planned.flow.stages):
            answer = " and ".join(ticket.options.modalities)
            raise RequestError(f"{stage}: this request does not use the stage; its answer is {answer}", parameter=stage)

    def _check_media(self, request: Rendered) -> None:
        if self._max_media_tokens is None:
            return
        for feature in request.features:
            if (tokens := feature.mm_position.get_num_embeds()) > self._max_media_tokens:
                raise RequestError(
                    f"messages: a part of type {feature.modality} has {tokens:,} tokens, "
                    f"but limits.max_media_tokens is {self._max_media_tokens:,}",
                    parameter="messages",
                )

    def attach(self, ticket: Ticket, request: EngineCoreRequest) -> str:
        """Write the plan into the engine request that vLLM made for the frontend stage; register the ticket for `open`.

        The caller must pass the returned key to `withdraw` when the request has ended.

        Returns:
            The ticket's key, which is also written into the engine request's `extra_args`.
        """
        params, planned, key = request.sampling_params, ticket.planned, self._register(ticket)
        assert params is not None and planned is not None
        params.extra_args = {**(params.extra_args or {}), **planned.frontend_args, TICKET: key}
        if planned.prompt is not None:
            request.prompt_token_ids = list(planned.prompt)
        if planned.features is not None:
            request.mm_features = list(planned.features)
        if planned.skip_prefix_cache:
            params.skip_reading_prefix_cache = True
        return key

    async def open(self, request: EngineCoreRequest) -> None:
        """Start the flow of the engine request that vLLM made from a client's request.

        vLLM's engine client calls this method instead of sending the engine request; for `n` answers, `n` times.
        """
        params = request.sampling_params
        extra = (params.extra_args if params is not None else None) or {}
        ticket = self._tickets.get(extra.get(TICKET, "")) or Ticket(options=self._default)
        if params is not None and TICKET in extra:  # a new dict, as several answers may share the old one
            params.extra_args = {key: value for key, value in extra.items() if key != TICKET} or None
        ticket.request_ids.append(request.request_id)
        await self.start(ticket, request.request_id, request.external_req_id or request.request_id, request)

    async def start(
        self, ticket: Ticket, request_id: str, external_id: str, request: EngineCoreRequest | None = None
    ) -> None:
        """Start the flow of a request in the orchestrator.

        Args:
            request_id: unique id inside this API server.
            external_id: the caller's id.
            request: vLLM's engine request; None if nothing is forwarded to the frontend.
        """
        planned = ticket.planned or Planned(flow=ForwardFlow(self._frontend))
        await self._orchestrator.open(
            Opened(
                request_id=request_id,
                external_id=external_id,
                flow=planned.flow,
                options=ticket.options,
                sink=ticket.sink,
                client=None if request is None else client_request(request),
                scope=ticket.scope,
                actions=None if ticket.planned is None else ticket.actions,
                budgets=planned.budgets,
                arrival=time.time() if request is None else request.arrival_time,
                priority=ticket.priority if request is None else request.priority,
                trace_headers=None if request is None else request.trace_headers,
                watch=ticket.watch,
            )
        )


def _text_options(params: SamplingParams | None) -> list[str]:
    """Return the names of the `TEXT_OPTIONS` that `params` contain; none if there are no parameters."""
    return [name for name, attribute in TEXT_OPTIONS.items() if getattr(params, attribute, None) not in (None, [], "")]
