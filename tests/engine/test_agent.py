"""What holds for every replica: its load is known, and what a dead API server had sent ends, and nothing else."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import SchedulerConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState, SchedulerInterface
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.request import Request, RequestStatus

from vllm_omni_ext.engine import agent
from vllm_omni_ext.engine.agent import ReplicaAgent, WithAgent, with_agent
from vllm_omni_ext.engine.scheduler import StreamingInput
from vllm_omni_ext.plugins.runtime import Capabilities
from vllm_omni_ext.pool.load import Load
from vllm_omni_ext.runtime.client.replica import forget_request
from vllm_omni_ext.wire.stage_input import CHUNK, INPUT

DIED_AT = 100.0
STARVED = {INPUT: {"last": False, "hidden_spans": [[0, 5]]}}


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
    monkeypatch.setattr(Scheduler, "get_request_counts", lambda self: (len(self.requests), 0))
    monkeypatch.setattr(Scheduler, "get_kv_cache_usage", lambda self: 0.5)
    monkeypatch.setattr(Scheduler, "shutdown", lambda self: None)
    return made


def bare(cls: type[Any]) -> Any:
    made = cls.__new__(cls)
    made.requests, made._progress, made._chunks, made._parked = {}, {}, {}, {}
    made._pause_state = PauseState.UNPAUSED
    return made


def scheduler(cls: type[Any]) -> Any:
    return with_agent(bare(cls))


class OwnScheduler:
    """A scheduler of a plugin: as much of `SchedulerInterface` as the agent uses, and nothing of vLLM's."""

    pause_state = PauseState.UNPAUSED

    def __init__(self, ended: list[str]) -> None:
        self._ended = ended
        self.queue: list[Request] = []
        self.shut_down = False

    def add_request(self, request: Request) -> None:
        self.queue.append(request)

    def finish_requests(self, request_ids: Any, finished_status: RequestStatus) -> list[Request]:
        gone = [each for each in self.queue if each.request_id in request_ids]
        self.queue = [each for each in self.queue if each not in gone]
        self._ended.extend(each.request_id for each in gone)
        return gone

    def get_request_counts(self) -> tuple[int, int]:
        return 1, len(self.queue) - 1

    def get_kv_cache_usage(self) -> float:
        return 0.0

    def schedule(self) -> str:
        return "what to compute"

    def update_from_output(self, scheduled: str, output: str) -> dict[int, EngineCoreOutputs]:
        return {0: EngineCoreOutputs(scheduler_stats=SchedulerStats()), 1: EngineCoreOutputs()}

    def shutdown(self) -> None:
        self.shut_down = True


SCHEDULERS: dict[str, Callable[[Ended], tuple[Any, Callable[[Any], set[str]]]]] = {
    "vLLM's": lambda _: (scheduler(Scheduler), lambda made: set(made.requests)),
    "streaming input": lambda _: (scheduler(StreamingInput), lambda made: set(made.requests)),
    "a plugin's": lambda ended: (
        with_agent(OwnScheduler(ended)),  # type: ignore[arg-type]
        lambda made: {each.request_id for each in made.queue},
    ),
}


@pytest.fixture(params=SCHEDULERS)
def any_scheduler(request: pytest.FixtureRequest, ended: Ended) -> tuple[Any, Callable[[Any], set[str]]]:
    """A scheduler with an agent, and what tells its requests."""
    return SCHEDULERS[request.param](ended)


def test_only_its_requests_of_that_time_end(ended: Ended, any_scheduler: Any) -> None:
    made, held = any_scheduler
    for name, client, arrival in (("old", 1, 99.0), ("other", 0, 99.0), ("new", 1, 100.5), ("at", 1, DIED_AT)):
        made.add_request(request(name, client, arrival))
    made.add_request(forget(1))
    assert ended == ["old"]
    assert held(made) == {"other", "new", "at"}, "those of who came after it, and the order itself is none"


def test_twice_and_without_any(ended: Ended, any_scheduler: Any) -> None:
    made, held = any_scheduler
    made.add_request(forget(3))
    made.add_request(request("r", 3, 1.0))
    made.add_request(forget(3))
    made.add_request(forget(3))
    assert ended == ["r"] and not held(made)


def test_those_that_wait_for_their_input_end_too(ended: Ended) -> None:
    made = scheduler(StreamingInput)
    made.add_request(request("parked", 1, 50.0, **STARVED))
    made.add_request(request("parked by another", 0, 50.0, **STARVED))
    assert set(made._parked) == {"parked", "parked by another"} and not made.requests
    made.add_request(request("parked", 1, 50.0, **{CHUNK: {"prompt_positions": 0, "last": False}}))
    assert made._chunks
    made.add_request(forget(1))
    assert set(made._parked) == {"parked by another"} == set(made._progress)
    assert not made._chunks
    assert ended == []


def test_a_client_cannot_give_the_order() -> None:
    from vllm_omni_ext.orchestrator.admission import Admission

    params = forget_request(0, 1.0).sampling_params
    assert params is not None and params.extra_args
    runtime: Any = SimpleNamespace(
        capabilities=lambda: Capabilities(modalities=("text",), default_modalities=("text",))
    )
    orchestrator: Any = None
    Admission(runtime, orchestrator, "frontend").options_of(params, None)
    assert params.extra_args is None


def test_it_is_an_ordinary_message(ended: Ended) -> None:
    """It goes through vLLM's own encoder, as every request does."""
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    sent = MsgpackEncoder().encode(forget_request(2, 12.5))
    received = MsgpackDecoder(EngineCoreRequest).decode(sent)
    made = scheduler(Scheduler)
    made.add_request(request("r", 2, 12.0))
    made.add_request(Request.from_engine_core_request(received, None))
    assert ended == ["r"]


def test_the_load_is_less_at_once(ended: Ended) -> None:
    made = bare(StreamingInput)
    watched = ReplicaAgent(made)
    for each in (request("running", 1, 1.0), request("parked", 1, 1.0, **STARVED)):
        assert not watched.intercept(each)
        made.add_request(each)
    assert watched.load() == Load(waiting=1, running=1, kv_usage=0.5)
    assert watched.intercept(forget(1))
    assert watched.load() == Load(waiting=0, running=0, kv_usage=0.5)


def test_a_report_says_whether_the_scheduler_is_paused(ended: Ended) -> None:
    made = OwnScheduler(ended)
    agents: Any = ReplicaAgent(made)  # type: ignore[arg-type]
    assert not agents.load().asleep
    made.pause_state = PauseState.PAUSED_NEW
    assert agents.load().asleep and agents.load().within_bounds().asleep


def test_an_agent_holds_no_request(ended: Ended) -> None:
    watched = ReplicaAgent(bare(Scheduler))
    watched.intercept(request("ended elsewhere", 1, 1.0))
    assert not watched._requests


def test_the_agent_leaves_with_its_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(agent.ReplicaAgent, "start", lambda self: calls.append("start"))
    monkeypatch.setattr(agent.ReplicaAgent, "stop", lambda self: calls.append("stop"))
    made: Any = with_agent(OwnScheduler([]))  # type: ignore[arg-type]
    assert calls == ["start"] and not made.shut_down
    made.shutdown()
    assert calls == ["start", "stop"] and made.shut_down


def build_own(**kwargs: Any) -> Any:
    """A `scheduler_cls` that is a function, found by its name."""
    return OwnScheduler([])


def test_statistics_have_the_time_of_their_step(ended: Ended) -> None:
    made: Any = with_agent(OwnScheduler(ended))  # type: ignore[arg-type]
    before = time.time_ns()
    outputs = made.update_from_output(made.schedule(), "what came of it")
    assert before <= outputs[0].scheduler_stats.step_counter <= time.time_ns()
    assert outputs[1].scheduler_stats is None


class Built:
    """Notes which of vLLM's schedulers is built, in the place of building it."""

    def __init__(self, **kwargs: Any) -> None:
        self.kwargs = kwargs

    def add_request(self, request: Request) -> None:
        raise NotImplementedError

    shutdown = schedule = update_from_output = add_request


@pytest.mark.parametrize("given", [f"{__name__}.build_own", build_own, None], ids=["name", "function", "stock"])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_any_scheduler_cls_can_have_an_agent(
    given: Any, async_scheduling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM pickles its config for an engine in another process, and calls what it finds with keywords."""
    stock: SchedulerInterface | Any = AsyncScheduler if async_scheduling else Scheduler
    monkeypatch.setattr(f"{stock.__module__}.{stock.__name__}", Built)
    config = SchedulerConfig.default_factory()
    config.async_scheduling = async_scheduling
    config.scheduler_cls = WithAgent(given)  # type: ignore[assignment]
    config = pickle.loads(pickle.dumps(config))
    made = config.get_scheduler_cls()(vllm_config=SimpleNamespace(scheduler_config=config))  # type: ignore[call-arg]
    assert isinstance(made, Built if given is None else OwnScheduler)
    assert "add_request" in vars(made), "the agent sees every request"
