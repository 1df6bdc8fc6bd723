"""The end of what a dead API server had sent, in the schedulers: its requests and no others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from vllm_omni_ext.engine.report import ReportScheduler
from vllm_omni_ext.engine.scheduler import FeedScheduler
from vllm_omni_ext.runtime.replica import forget_request
from vllm_omni_ext.wire.handoff import PROMPT

DIED_AT = 100.0


def request(name: str, client: int, arrival: float, **extra: Any) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=[1, 2],
        sampling_params=SamplingParams(max_tokens=4, extra_args=extra or None),
        pooling_params=None,
        client_index=client,
        arrival_time=arrival,
    )


def forget(client: int, before: float = DIED_AT) -> Request:
    return Request.from_engine_core_request(forget_request(client, before), None)


class Ended(list[str]):
    """Requests that vLLM's scheduler was told to end, in its place."""

    def __call__(self, scheduler: Any, ids: Any, status: RequestStatus) -> list[Any]:
        assert status is RequestStatus.FINISHED_ABORTED
        known = [scheduler.requests.pop(name) for name in ids if name in scheduler.requests]
        self.extend(each.request_id for each in known)
        return known


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Ended:
    made = Ended()
    monkeypatch.setattr(Scheduler, "finish_requests", lambda *args: made(*args))
    monkeypatch.setattr(
        Scheduler, "add_request", lambda self, request: self.requests.update({request.request_id: request})
    )
    return made


def scheduler(cls: type[Any]) -> Any:
    made = cls.__new__(cls)
    made.requests, made._gates, made._chunks, made._parked = {}, {}, {}, {}
    return made


@pytest.mark.parametrize("cls", [ReportScheduler, FeedScheduler])
def test_only_its_requests_of_that_time_end(ended: Ended, cls: type[Any]) -> None:
    made = scheduler(cls)
    for name, client, arrival in (("old", 1, 99.0), ("other", 0, 99.0), ("new", 1, 100.5), ("at", 1, DIED_AT)):
        made.add_request(request(name, client, arrival))
    made.add_request(forget(1))
    assert ended == ["old"]
    assert set(made.requests) == {"other", "new", "at"}, "those of who came after it, and the order itself is none"


@pytest.mark.parametrize("cls", [ReportScheduler, FeedScheduler])
def test_twice_and_without_any(ended: Ended, cls: type[Any]) -> None:
    made = scheduler(cls)
    made.add_request(forget(3))
    made.add_request(request("r", 3, 1.0))
    made.add_request(forget(3))
    made.add_request(forget(3))
    assert ended == ["r"] and not made.requests


def test_those_that_wait_for_their_input_end_too(ended: Ended) -> None:
    made = scheduler(FeedScheduler)
    starved = {PROMPT: {"track": [], "rows": [[0, 5]]}}
    made.add_request(request("parked", 1, 50.0, **starved))
    made.add_request(request("parked by another", 0, 50.0, **starved))
    assert set(made._parked) == {"parked", "parked by another"} and not made.requests
    made._chunks["parked"] = [{}]
    made.add_request(forget(1))
    assert set(made._parked) == {"parked by another"} == set(made._gates)
    assert not made._chunks
    assert ended == []


def test_a_client_cannot_give_the_order() -> None:
    from vllm_omni_ext.omni import _check_reserved

    params = forget_request(0, 1.0).sampling_params
    assert params is not None and params.extra_args
    _check_reserved(params)
    assert params.extra_args is None


def test_it_is_an_ordinary_message(ended: Ended) -> None:
    """It goes through vLLM's own encoder, as every request does."""
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    sent = MsgpackEncoder().encode(forget_request(2, 12.5))
    received = MsgpackDecoder(EngineCoreRequest).decode(sent)
    made = scheduler(ReportScheduler)
    made.add_request(request("r", 2, 12.0))
    made.add_request(Request.from_engine_core_request(received, None))
    assert ended == ["r"]


def test_the_load_is_less_at_once(ended: Ended) -> None:
    made = scheduler(FeedScheduler)
    made.get_request_counts = lambda: (len(made.requests), 0)
    made.kv_cache_manager = SimpleNamespace(usage=0.0)
    made.add_request(request("running", 1, 1.0))
    made.add_request(request("parked", 1, 1.0, **{PROMPT: {"track": [], "rows": [[0, 5]]}}))
    assert (made.load().running, made.load().waiting) == (1, 1)
    made.add_request(forget(1))
    assert (made.load().running, made.load().waiting) == (0, 0)
