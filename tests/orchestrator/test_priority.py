"""The order in which vLLM's scheduler gets the requests of a stage."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams

from tests.support.fakes import part
from vllm_omni_ext.errors import RequestError
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.omni import AsyncOmni
from vllm_omni_ext.orchestrator.admission import PRIORITY
from vllm_omni_ext.orchestrator.engine_requests import EngineRequests
from vllm_omni_ext.orchestrator.messages import SendOpen, SendPart
from vllm_omni_ext.plugins.flow import Open
from vllm_omni_ext.wire.priorities import MOST, of_request

REPLICA = ReplicaId("sound", 0)


def test_parts_are_in_the_order_of_priority_and_then_of_due_time() -> None:
    requests = EngineRequests()

    def priority(due: float | None, of_request: int = 0) -> int:
        action = replace(part([1]), due=due)
        sent = SendPart(REPLICA, "r", "r/0", stream="r", action=action, priority=of_request)
        made: int = requests.make(sent).priority
        return made

    live = [priority(due) for due in (1.0, None, 1e9)]
    assert live == sorted(live)
    later = [priority(due, number) for number in (1, 2, MOST) for due in (1.0, 1e9)]
    assert live[-1] < later[0] and later == sorted(later)
    assert priority(1e9, -1) < live[0]
    assert priority(1.0, -MOST) >= -(1 << 63) and priority(1e9, MOST) < 1 << 63
    assert [of_request(priority(due, number)) for number in (-MOST, -1, 0, 1, MOST) for due in (1.0, 1e9)] == [
        number for number in (-MOST, -1, 0, 1, MOST) for _ in range(2)
    ]
    assert [of_request(number) for number in (-MOST, -1, 0, 1, MOST)] == [-MOST, -1, 0, 1, MOST]


def test_an_opened_request_has_the_priority_of_its_client() -> None:
    sent = SendOpen(
        REPLICA,
        "r",
        "r",
        action=Open(stage="sound", prompt=[1, 2], prompt_positions=2),
        params=SamplingParams(),
        priority=7,
    )
    assert EngineRequests().make(sent).priority == 7


@pytest.mark.parametrize("policy", ["priority", "fcfs"])
@pytest.mark.parametrize(
    ("given", "of_header", "expected"), [(None, 0, 0), (0, 3, 3), (5, 0, 5), (-1, 3, -1), (MOST + 1, 0, MOST + 1)]
)
def test_a_priority_is_used_or_refused(policy: str, given: int | None, of_header: int, expected: int) -> None:
    omni: Any = AsyncOmni.__new__(AsyncOmni)
    omni.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(policy=policy))
    before = PRIORITY.set(of_header)
    try:
        if expected and policy == "fcfs":
            with pytest.raises(RequestError, match="priority: must be 0 without --scheduling-policy priority"):
                omni._priority(given)
        elif expected > MOST:
            with pytest.raises(RequestError, match=f"priority: must be -{MOST} to {MOST}"):
                omni._priority(given)
        else:
            assert omni._priority(given) == expected
    finally:
        PRIORITY.reset(before)
        omni._fleet_open = None
