"""Turns options into requests: tickets, one plan per request, and the plan's parameters for vLLM."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreRequest

from vllm_omni_ext.config.checks import modality_names
from vllm_omni_ext.errors import RequestError
from vllm_omni_ext.modalities.base import TEXT
from vllm_omni_ext.orchestrator.engine_requests import client_request
from vllm_omni_ext.orchestrator.messages import Opened
from vllm_omni_ext.orchestrator.orchestrator import Orchestrator
from vllm_omni_ext.plugins.flow import Action, Forward, ForwardFlow
from vllm_omni_ext.plugins.runtime import Capabilities, ModelRuntime, Planned, Rendered, RequestOptions
from vllm_omni_ext.wire.stage_input import RESERVED, TICKET


@dataclass(frozen=True, kw_only=True)
class Admitted:
    """A request that has been planned and can begin.

    Attributes:
        actions: the first actions of the flow.
        sink: the queue of its chunks; None if it has no chunks.
    """

    planned: Planned
    options: RequestOptions
    actions: Sequence[Action]
    sink: asyncio.Queue[Any] | None

    @property
    def forwarded(self) -> bool:
        """Whether the request uses the frontend."""
        return any(isinstance(action, Forward) for action in self.actions)


class Admission:
    """Plans requests; one per API server.

    Args:
        model_frontend: the frontend's name in flows.
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
        self.capabilities = with_default(runtime.capabilities(), default_modalities)
        text_only = TEXT in self.capabilities.modalities
        self._runtime = runtime
        self._orchestrator = orchestrator
        self._frontend = model_frontend
        self._max_media_tokens = max_media_tokens
        self._default = RequestOptions(modalities=(TEXT,) if text_only else self.capabilities.default_modalities)
        self._expected: dict[str, tuple[RequestOptions, bool]] = {}
        self._admitted: dict[str, Admitted] = {}

    def held(self) -> int:
        """Number of unused tickets plus running planned requests (0 when idle)."""
        return len(self._expected) + len(self._admitted)

    def expect(self, options: RequestOptions, *, all_text: bool = False) -> str:
        """Announce a request; the ticket goes into its `extra_args[TICKET]`.

        Args:
            all_text: each output has all text so far, also if the handler needs the last output only.

        Raises:
            RequestError: the options cannot be met.
        """
        self._runtime.validate(options)
        ticket = uuid.uuid4().hex  # clients must not be able to guess another client's ticket
        self._expected[ticket] = options, all_text
        return ticket

    def withdraw(self, ticket: str) -> None:
        """Drop a ticket that is used or no longer needed; unknown tickets are ignored."""
        self._expected.pop(ticket, None)

    def options_of(self, params: Any, given: RequestOptions | None) -> RequestOptions:
        """Return a request's options. Removes the keys of `extra_args` that stages read: clients must not set them.

        Raises:
            RequestError: the options cannot be met.
        """
        extra = getattr(params, "extra_args", None) or {}
        ticket = extra.get(TICKET)
        expected, all_text = self._expected.pop(ticket if isinstance(ticket, str) else "", (None, False))
        if all_text:
            params.output_kind = RequestOutputKind.CUMULATIVE
        if RESERVED & extra.keys():
            params.extra_args = {key: value for key, value in extra.items() if key not in RESERVED} or None
        if given is not None:
            self._runtime.validate(given)
        return given or expected or self._default

    def admit(self, request: Rendered, options: RequestOptions, *, answers: int = 1) -> Admitted:
        """Plan a request; called once per request.

        Raises:
            RequestError: the request cannot be served.
            StageUnavailable: a stage that the request needs has no live replica.
        """
        self._check_media(request)
        planned = self._runtime.plan(request, options)
        self._orchestrator.require(planned.flow)
        alone = isinstance(planned.flow, ForwardFlow)
        if answers != 1 and not alone:
            requested = ", ".join(options.modalities)
            raise RequestError(f"n: must be 1 when {requested} is requested", parameter="n")
        sink = None if alone else asyncio.Queue[Any]()
        return Admitted(planned=planned, options=options, actions=tuple(planned.flow.begin()), sink=sink)

    def _check_media(self, request: Rendered) -> None:
        if self._max_media_tokens is None:
            return
        for feature in request.features:
            if (tokens := feature.mm_position.get_num_embeds()) > self._max_media_tokens:
                raise RequestError(
                    f"messages: a part of type {feature.modality} has {tokens:,} tokens, "
                    f"but max_media_tokens is {self._max_media_tokens:,}",
                    parameter="messages",
                )

    def attach(self, admitted: Admitted, request: EngineCoreRequest) -> str:
        """Write the plan's parameters, and the ticket that leads back to the plan, into the client's engine request."""
        params, planned, ticket = request.sampling_params, admitted.planned, uuid.uuid4().hex
        assert params is not None
        params.extra_args = {**(params.extra_args or {}), **planned.frontend_args, TICKET: ticket}
        if planned.skip_prefix_cache:
            params.skip_reading_prefix_cache = True
        self._admitted[ticket] = admitted
        return ticket

    def detach(self, ticket: str) -> None:
        """Drop the plan of a request that has ended."""
        self._admitted.pop(ticket, None)

    async def open(self, request: EngineCoreRequest) -> None:
        """Begin a request that vLLM has accepted; with several answers (`n`), vLLM calls this for each answer."""
        params = request.sampling_params
        extra = (params.extra_args if params is not None else None) or {}
        admitted = self._admitted.get(extra.get(TICKET, ""))
        if params is not None and TICKET in extra:  # answers may share the dict
            params.extra_args = {key: value for key, value in extra.items() if key != TICKET} or None
        flow = ForwardFlow(self._frontend) if admitted is None else admitted.planned.flow
        await self._orchestrator.open(
            Opened(
                request_id=request.request_id,
                external_id=request.external_req_id or request.request_id,
                flow=flow,
                options=self._default if admitted is None else admitted.options,
                sink=None if admitted is None else admitted.sink,
                client=client_request(request),
                actions=None if admitted is None else tuple(admitted.actions),
                budgets={} if admitted is None else admitted.planned.budgets,
                arrival=request.arrival_time,
                trace_headers=request.trace_headers,
                at=asyncio.get_running_loop().time(),
            )
        )

    async def start(self, admitted: Admitted, request_id: str, external_id: str) -> None:
        """Begin a request that does not use the frontend."""
        await self._orchestrator.open(
            Opened(
                request_id=request_id,
                external_id=external_id,
                flow=admitted.planned.flow,
                options=admitted.options,
                sink=admitted.sink,
                actions=tuple(admitted.actions),
                budgets=admitted.planned.budgets,
                arrival=time.time(),
                at=asyncio.get_running_loop().time(),
            )
        )


def with_default(capabilities: Capabilities, names: str | None) -> Capabilities:
    """Capabilities with the configured default, a comma-separated list; None keeps the model's.

    Raises:
        ConfigError: the model has no such modality.
    """
    if names is None:
        return capabilities
    wanted = modality_names(names, capabilities.modalities, "this model")
    return replace(capabilities, default_modalities=wanted)
