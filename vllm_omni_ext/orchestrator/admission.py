"""Plans requests between vLLM's handlers and the orchestrator: registers their options, and starts their flows."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreRequest

from vllm_omni_ext.config.checks import modality_names
from vllm_omni_ext.errors import RequestError
from vllm_omni_ext.modalities.base import TEXT
from vllm_omni_ext.observability.request_trace import RequestTrace
from vllm_omni_ext.orchestrator.engine_requests import client_request
from vllm_omni_ext.orchestrator.messages import Opened
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
"""Fields of requests whose values vLLM uses with the text of the frontend only: attribute of `SamplingParams`."""

PRIORITY: ContextVar[int] = ContextVar("priority", default=0)
"""Priority of the current HTTP request, from vLLM's header; for requests whose API has no field of its own for it."""


@dataclass(kw_only=True)
class Ticket:
    """The options and the plan of a request, kept here while vLLM's handlers process the request.

    Attributes:
        all_text: each output has all text so far, also if the handler needs the last output only.
        watch: called with the observer's record of the request; with `n` answers, once for each.
        priority: for every stage of a request that is not sent to the frontend; the lowest is scheduled first.
        planned: the plan; None before `Admission.admit`.
        actions: the first actions of the flow.
        sink: the queue for the chunks and errors of the request; None if only the frontend answers it.
    """

    options: RequestOptions
    all_text: bool = False
    watch: Callable[[RequestTrace], None] | None = None
    priority: int = 0
    planned: Planned | None = None
    actions: tuple[Action, ...] = ()
    sink: asyncio.Queue[Any] | None = None

    @property
    def forwarded(self) -> bool:
        """Whether the flow sends the client's request to the frontend."""
        return any(isinstance(action, Forward) for action in self.actions)


class Admission:
    """Plans requests; one per API server.

    A ticket holds the plan of a request. It is registered under a random key, which clients cannot guess.
    `extra_args[TICKET]` holds the key; vLLM copies it from the handler to `generate`. `generate` replaces it by a
    second key, which the engine request has.

    Args:
        model_frontend: name that flows use for the frontend stage.
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
        """Register a request before it is submitted; return the key for its `extra_args[TICKET]`.

        Raises:
            RequestError: the options are invalid.
        """
        self._runtime.validate(ticket.options)
        return self._register(ticket)

    def withdraw(self, key: str) -> None:
        """Remove the ticket with this key; an unknown key is ignored."""
        self._tickets.pop(key, None)

    def ticket(self, params: Any, options: RequestOptions | None) -> Ticket:
        """Return a request's ticket: a new one for `options`, the one registered by `expect`, or one for the defaults.

        Removes the keys of `extra_args` that stages read: clients must not set them.

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
            answers: number of answers (`n`).
            params: the client's parameters for the frontend; None if the frontend takes others, or the request has no
                prompt for it.

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
        alone = isinstance(planned.flow, ForwardFlow)
        if answers != 1 and not alone:
            requested = ", ".join(ticket.options.modalities)
            raise RequestError(f"n: must be 1 when {requested} is requested", parameter="n")
        ticket.planned, ticket.actions = planned, tuple(planned.flow.begin())
        if params is not None and not ticket.forwarded and self._frontend in planned.flow.stages:
            _refuse_text_options(params, self._frontend)
        ticket.sink = None if alone else asyncio.Queue()

    def refuse_unused(self, ticket: Ticket) -> None:
        """Refuse parameters that a field named after a stage sets if the planned request does not use the stage.

        Raises:
            RequestError: names the field.
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
        """Write the plan into the client's engine request; register the ticket for `open`, return its key.

        The caller must pass the key to `withdraw` when the request has ended.
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
        """Start the flow of a client's engine request; with several answers (`n`), vLLM calls this for each answer."""
        params = request.sampling_params
        extra = (params.extra_args if params is not None else None) or {}
        ticket = self._tickets.get(extra.get(TICKET, "")) or Ticket(options=self._default)
        if params is not None and TICKET in extra:  # a new dict, as several answers may share the old one
            params.extra_args = {key: value for key, value in extra.items() if key != TICKET} or None
        await self.start(ticket, request.request_id, request.external_req_id or request.request_id, request)

    async def start(
        self, ticket: Ticket, request_id: str, external_id: str, request: EngineCoreRequest | None = None
    ) -> None:
        """Start the flow of a request; `request` is None if the flow does not use the frontend."""
        planned = ticket.planned or Planned(flow=ForwardFlow(self._frontend))
        await self._orchestrator.open(
            Opened(
                request_id=request_id,
                external_id=external_id,
                flow=planned.flow,
                options=ticket.options,
                sink=ticket.sink,
                client=None if request is None else client_request(request),
                actions=None if ticket.planned is None else ticket.actions,
                budgets=planned.budgets,
                arrival=time.time() if request is None else request.arrival_time,
                priority=ticket.priority if request is None else request.priority,
                trace_headers=None if request is None else request.trace_headers,
                watch=ticket.watch,
            )
        )


def _refuse_text_options(params: SamplingParams, stage: str) -> None:
    """Refuse parameters that need the frontend's text, for a request whose flow opens the frontend itself.

    Raises:
        RequestError: names the parameter, as a field of `/v1/chat/completions`.
    """
    for field, attribute in TEXT_OPTIONS.items():
        if getattr(params, attribute) not in (None, [], ""):
            raise RequestError(f"{field}: is for text; stage '{stage}' makes no text of this request", parameter=field)
