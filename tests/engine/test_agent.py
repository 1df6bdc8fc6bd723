"""For every scheduler: the load is reported, and requests of a dead API server end, and no others."""

from __future__ import annotations

import pickle
import time
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import SchedulerConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from tests.engine.schedulers import OwnScheduler
from vllm_omni_ext.config.schema import MAX_MEDIA_TOKENS
from vllm_omni_ext.engine import agent
from vllm_omni_ext.engine.agent import ReplicaAgent, WithAgent, with_agent
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.orchestrator.admission import Admission
from vllm_omni_ext.plugins.runtime import Capabilities
from vllm_omni_ext.pool.load import Load
from vllm_omni_ext.runtime.client.replica import abort_client

DIED_AT = 100.0


def request(name: str, client: int, arrival: float) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=[1, 2],
        sampling_params=SamplingParams(max_tokens=4),
        pooling_params=None,
        client_index=client,
        arrival_time=arrival,
    )


def forget(client: int, before: float = DIED_AT) -> Request:
    """The command after it has passed through vLLM's encoder."""
    sent = MsgpackEncoder().encode(abort_client(client, before))
    return Request.from_engine_core_request(MsgpackDecoder(EngineCoreRequest).decode(sent), None)


def own(ended: list[str] | None = None) -> Any:
    return OwnScheduler([] if ended is None else ended)


def test_only_requests_that_the_dead_api_server_had_sent_end() -> None:
    ended: list[str] = []
    made = with_agent(own(ended))
    made.add_request(forget(1))  # there are none yet
    for name, client, arrival in (("old", 1, 99.0), ("other", 0, 99.0), ("new", 1, 100.5), ("at", 1, DIED_AT)):
        made.add_request(request(name, client, arrival))
    made.add_request(forget(1))
    made.add_request(forget(1))
    assert ended == ["old"]
    assert {each.request_id for each in made.queue} == {"other", "new", "at"}, "the command itself is no request"


def test_a_client_cannot_end_the_requests_of_others() -> None:
    params = abort_client(0, 1.0).sampling_params
    assert params is not None and params.extra_args
    capabilities = Capabilities(modalities=("text",), default_modalities=("text",))
    runtime: Any = SimpleNamespace(capabilities=lambda: capabilities)
    orchestrator: Any = None
    Admission(runtime, orchestrator, "frontend").ticket(params, None)
    assert params.extra_args is None


def test_the_load_of_a_paused_scheduler_is_marked() -> None:
    made = own()
    watched = ReplicaAgent(made)
    made.add_request(request("r", 0, 1.0))
    assert watched.load() == Load(waiting=0, running=1, kv_usage=0.0)
    made.pause_state = PauseState.PAUSED_NEW
    assert watched.load() == Load(waiting=0, running=1, kv_usage=0.0, asleep=True)


def test_an_agent_keeps_no_request_alive() -> None:
    watched = ReplicaAgent(own())
    watched.intercept(request("ended elsewhere", 1, 1.0))
    assert not watched._requests


def test_the_agent_stops_with_its_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(agent.ReplicaAgent, "start", lambda self: calls.append("start"))
    monkeypatch.setattr(agent.ReplicaAgent, "stop", lambda self: calls.append("stop"))
    made: Any = with_agent(own())
    assert calls == ["start"] and not made.shut_down
    made.shutdown()
    assert calls == ["start", "stop"] and made.shut_down


def test_statistics_have_the_time_of_their_step() -> None:
    made: Any = with_agent(own())
    before = time.time_ns()
    outputs = made.update_from_output(made.schedule(), "output")
    assert before <= outputs[0].scheduler_stats.step_counter <= time.time_ns()
    assert outputs[1].scheduler_stats is None


def build_own(**kwargs: Any) -> Any:
    """A `scheduler_cls` that is a function, found by its name."""
    return own()


class Built(OwnScheduler):
    """Stands for one of vLLM's schedulers."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__([])


@pytest.mark.parametrize("given", [f"{__name__}.build_own", build_own, None], ids=["name", "function", "stock"])
@pytest.mark.parametrize("stock", [Scheduler, AsyncScheduler])
def test_any_scheduler_cls_can_have_an_agent(given: Any, stock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM pickles its config for an engine in another process."""
    monkeypatch.setattr(f"{stock.__module__}.{stock.__name__}", Built)
    config = SchedulerConfig.default_factory()
    config.async_scheduling = stock is AsyncScheduler
    config.scheduler_cls = WithAgent(given)  # type: ignore[assignment]
    config = pickle.loads(pickle.dumps(config))
    vllm_config = SimpleNamespace(
        scheduler_config=config, additional_config={}, parallel_config=SimpleNamespace(_api_process_count=2)
    )
    made: Any = config.get_scheduler_cls()(vllm_config=vllm_config)  # type: ignore[call-arg]
    assert isinstance(made, OwnScheduler) and isinstance(made, Built) is (given is None)
    assert "add_request" in vars(made), "the agent receives every request"
    assert vllm_config.parallel_config._api_process_count == 1, "vLLM's engine makes its receiver cache for media"


class Encoding(Scheduler):
    """A scheduler of vLLM with an encoder."""

    def __init__(self, **kwargs: Any) -> None:
        self.max_num_encoder_input_tokens = 60_000

    def shutdown(self) -> None:
        """Nothing was started."""


@pytest.mark.parametrize(
    ("given", "most"), [({}, 60_000), ({MAX_MEDIA_TOKENS: 9_000}, 9_000), ({MAX_MEDIA_TOKENS: 70_000}, 60_000)]
)
def test_a_step_encodes_no_more_than_the_limit_of_media(given: dict[str, int], most: int) -> None:
    config = SchedulerConfig.default_factory()
    vllm_config = SimpleNamespace(scheduler_config=config, additional_config=given, parallel_config=SimpleNamespace())
    made: Any = WithAgent(Encoding)(vllm_config=vllm_config)
    assert made.max_num_encoder_input_tokens == most
    made.shutdown()


def test_a_limit_of_media_that_a_scheduler_cannot_apply_is_refused() -> None:
    config = SimpleNamespace(
        scheduler_config=SchedulerConfig.default_factory(),
        additional_config={MAX_MEDIA_TOKENS: 9},
        parallel_config=SimpleNamespace(),
    )
    with pytest.raises(ConfigError, match="max_media_tokens: OwnScheduler is no scheduler of vLLM's"):
        WithAgent(build_own)(vllm_config=config)
