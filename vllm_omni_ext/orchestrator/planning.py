"""What is held for a text request that came with a ticket."""

from __future__ import annotations

from collections.abc import Mapping

from vllm.v1.engine import EngineCoreRequest

from vllm_omni_ext.orchestrator.live import Live, Ticket
from vllm_omni_ext.orchestrator.requests import RequestPlugin, TextRequest
from vllm_omni_ext.wire.handoff import EXPORT


def planned(request: EngineCoreRequest, ticket: Ticket, plugin: RequestPlugin, limits: Mapping[str, int]) -> Live:
    """Have the plugin plan the request's way; what it wants of the text stage is written into `request`.

    Args:
        limits: longest sequence in tokens, by stage.

    Raises:
        RequestError: the plugin cannot serve this prompt.
    """
    params = request.sampling_params
    assert params is not None, "the ticket came with them"
    extra = params.extra_args or {}
    text = TextRequest(prompt=request.prompt_token_ids or [], features=request.mm_features or [], extra_args=extra)
    flow = plugin.open(text, ticket.options)
    params.extra_args = extra or None
    if text.skip_prefix_cache:
        params.skip_reading_prefix_cache = True
    ticket.request_id = request.request_id
    external_id = request.external_req_id or request.request_id
    room = plugin.room(text.prompt, ticket.options, limits)
    exporting = request if EXPORT in extra else None
    return Live(flow, ticket.options, ticket.sink, external_id, room, text=exporting)
