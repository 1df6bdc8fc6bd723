"""The engine client addresses its requests by their own ids."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.orchestrator.test_admission import BOTH, RENDERED, Desk
from tests.support.fakes import text_request
from vllm_omni_ext.omni import AsyncOmni


async def test_the_outputs_of_one_request_end_and_not_those_of_another_with_the_same_external_id() -> None:
    desk, names = Desk(), ("a", "b")
    tickets = [desk.admit(RENDERED, BOTH) for _ in names]
    for name, ticket in zip(names, tickets, strict=True):
        request = text_request(name)
        request.external_req_id = "chatcmpl-trace"
        desk.admission.attach(ticket, request)
        await desk.admission.open(request)
    known = {"chatcmpl-trace": list(names)}
    omni: Any = SimpleNamespace(
        orchestrator=desk.bench.orchestrator, output_processor=SimpleNamespace(external_req_ids=known)
    )
    first, second = desk.bench.of("voice/0").added
    await AsyncOmni.text_only(omni, tickets[0])
    assert desk.bench.of("voice/0").aborted == [first.request_id] and first.request_id != second.request_id
    assert desk.bench.of("text/0").aborted == []
