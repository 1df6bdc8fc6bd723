"""A request is computed as far as its input has arrived: vLLM's own scheduler, without a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import FinishReason
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tests.engine.schedulers import Arrivals, runner_output, stage_config
from vllm_omni_ext.engine.agent import ReplicaAgent
from vllm_omni_ext.engine.scheduler import streaming_input_scheduler
from vllm_omni_ext.runtime.client.replica import abort_client
from vllm_omni_ext.wire.envelope import StageError, pack, unpack
from vllm_omni_ext.wire.stage_input import CHUNK, INPUT, HiddenStatesRef, StageInput

SIZE, BLOCKS = 20, 40
BUDGET = 16  # tokens of one step


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmConfig]:
    engine = {"max_num_batched_tokens": BUDGET, "max_num_seqs": 2, "max_model_len": 64}
    with stage_config(tmp_path_factory.mktemp("tiny"), "talker", **engine) as made:
        yield made


@pytest.fixture(params=[False, True], ids=["", "async"])
def scheduler(config: VllmConfig, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(config.scheduler_config, "async_scheduling", request.param)
    monkeypatch.setattr(config.cache_config, "enable_prefix_caching", not request.param)
    size = config.cache_config.block_size
    layer = FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=1, dtype=torch.float32)
    config.cache_config.num_gpu_blocks = BLOCKS
    made: Any = streaming_input_scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer"], layer)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=size,
    )
    made._receiver = Arrivals()
    return made


def opened(name: str = "r", last: bool = False, client: int = 0, **fields: Any) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=[0] * SIZE,
        sampling_params=SamplingParams(max_tokens=30, extra_args={INPUT: StageInput(last=last, **fields)}),
        pooling_params=None,
        client_index=client,
        arrival_time=50.0,
    )


def chunk(name: str = "r", hidden: int = 0, prompt_positions: int = 0, **fields: Any) -> Request:
    """`hidden`: number of hidden states that can be taken."""
    ref = HiddenStatesRef(source="s", name=name, count=hidden) if hidden else None
    given = StageInput(prompt_positions=prompt_positions, hidden_states=ref, last=False, **fields)
    return Request(
        request_id=name,
        prompt_token_ids=[0],
        sampling_params=SamplingParams(extra_args={CHUNK: given}),
        pooling_params=None,
    )


def steps(scheduler: Any, most: int = 20) -> list[dict[str, int]]:
    """The steps until the engine would sleep; each completed prompt or step samples a token."""
    done = []
    while scheduler.has_requests() and len(done) < most:
        output: SchedulerOutput = scheduler.schedule()
        names = list(output.num_scheduled_tokens)
        ready = [not scheduler.requests[name].is_prefill_chunk for name in names]
        sampled = [[7] if yes else [] for yes in ready]
        scheduler.update_from_output(output, runner_output(names, sampled))
        if names:
            done.append(dict(output.num_scheduled_tokens))
    return done


def test_a_request_runs_as_far_as_its_input_has_arrived(scheduler: Any) -> None:
    scheduler.add_request(opened(prompt_positions=SIZE - 1, hidden_spans=((4, 6), (10, 13))))
    assert steps(scheduler) == [{"r": 4}]
    scheduler.add_request(chunk(hidden=1))
    assert steps(scheduler) == [{"r": 1}]
    scheduler.add_request(chunk(hidden=3))
    assert steps(scheduler) == [{"r": 6}]
    scheduler.add_request(chunk(hidden=5))
    assert steps(scheduler) == [{"r": 8}]
    assert scheduler.requests["r"].num_output_tokens == 0
    scheduler.add_request(chunk(prompt_positions=1))
    assert steps(scheduler) == [{"r": 1}], "the first code, which needs no step input"
    scheduler.add_request(chunk(step_inputs=2))
    assert steps(scheduler) == [{"r": 1}, {"r": 1}]
    assert scheduler.requests["r"].num_output_tokens == 3


@pytest.mark.parametrize("known", [False, True])
def test_request_without_input_does_not_block_other_requests(scheduler: Any, known: bool) -> None:
    prompt: dict[str, Any] = {} if known else {"hidden_spans": ((0, 2),)}
    scheduler.add_request(opened("first", prompt_positions=SIZE - 1, last=False, **prompt))
    scheduler.add_request(opened("second", prompt_positions=SIZE, step_inputs=1, last=True))
    computed: dict[str, int] = {}
    for step in steps(scheduler, most=4):
        for name, count in step.items():
            computed[name] = computed.get(name, 0) + count
    assert computed["second"] >= SIZE
    assert computed.get("first", 0) == (SIZE - 1 if known else 0)


def test_request_with_all_input_at_once_is_scheduled_like_stock(scheduler: Any) -> None:
    scheduler.add_request(opened(prompt_positions=SIZE, step_inputs=2))
    assert steps(scheduler) == [{"r": BUDGET}, {"r": SIZE - BUDGET}, {"r": 1}, {"r": 1}]


@pytest.mark.parametrize("when", [0, 1, 2])
def test_preempted_request_is_recomputed_up_to_its_known_input(scheduler: Any, when: int) -> None:
    scheduler.add_request(opened(prompt_positions=SIZE - 1, hidden_spans=((4, 6),)))
    moves: list[Callable[[], None]] = [
        lambda: None,
        lambda: scheduler.add_request(chunk(hidden=2)),
        lambda: scheduler.add_request(chunk(prompt_positions=1, step_inputs=1)),
    ]
    for move in moves[: when + 1]:
        move()
        steps(scheduler)
    request = scheduler.running.pop()
    before = request.num_tokens, request.num_computed_tokens
    scheduler._preempt_request(request, 0.0)
    assert sum(step["r"] for step in steps(scheduler)) == before[1], "also the step that waits for its step input"
    assert (request.num_tokens, request.num_computed_tokens) == before


@pytest.mark.parametrize("known", [SIZE - 1, SIZE], ids=["prefill", "sampled"])
def test_a_request_that_the_worker_refuses_ends_alone_with_the_reason(scheduler: Any, known: int) -> None:
    for name in ("bad", "good"):
        scheduler.add_request(opened(name, prompt_positions=known, step_inputs=1))
    output = scheduler.schedule()
    names = list(output.num_scheduled_tokens)
    sampled = [[] if scheduler.requests[name].is_prefill_chunk else [7] for name in names]
    answers = [pack(StageError("the hidden states are gone")) if name == "bad" else None for name in names]
    outputs = scheduler.update_from_output(output, runner_output(names, sampled, answers))
    (bad,) = [each for each in outputs[0].outputs if each.request_id == "bad"]
    assert bad.finish_reason == FinishReason.ERROR
    assert unpack(bad.pooling_output) == StageError("the hidden states are gone")
    assert set(scheduler.requests) == {"good"} == set(scheduler._progress)
    assert "bad" in scheduler.finished_req_ids, "so that the worker forgets it"


def test_a_request_that_the_input_provider_ends_stops_with_its_last_output(scheduler: Any) -> None:
    for name in ("ends", "runs"):
        scheduler.add_request(opened(name, prompt_positions=SIZE, step_inputs=1))
    while any(scheduler.requests[name].is_prefill_chunk for name in ("ends", "runs")) or not scheduler.running:
        output = scheduler.schedule()
        names = list(output.num_scheduled_tokens)
        sampled = [[] if scheduler.requests[name].is_prefill_chunk else [7] for name in names]
        runner = runner_output(names, sampled, [torch.ones(1) for _ in names])
        runner.ended = ["ends"] if [7] in sampled else []
        outputs = scheduler.update_from_output(output, runner)
        if "ends" not in scheduler.requests:
            break
    (last,) = [each for each in outputs[0].outputs if each.request_id == "ends"]
    assert (last.finish_reason, last.new_token_ids) == (FinishReason.STOP, [7])
    assert last.pooling_output.tolist() == [1.0]
    assert set(scheduler.requests) == {"runs"} == set(scheduler._progress)
    assert "ends" in scheduler.finished_req_ids


@pytest.mark.parametrize("given", [None, "r", ["r", "unknown"]], ids=str)
def test_a_request_aborted_while_it_waits_for_hidden_states_is_reported(scheduler: Any, given: Any) -> None:
    scheduler.add_request(opened(hidden_spans=((0, 5),)))
    ended = scheduler.finish_requests(given, RequestStatus.FINISHED_ABORTED)
    assert [(each.request_id, each.status) for each in ended] == [("r", RequestStatus.FINISHED_ABORTED)]
    assert not scheduler._parked and not scheduler._progress
    assert scheduler.finish_requests(given, RequestStatus.FINISHED_ABORTED) == []


def test_a_pause_completes_when_no_request_can_run_and_they_run_after_it(scheduler: Any) -> None:
    scheduler.add_request(opened("stuck", prompt_positions=SIZE - 1))
    scheduler.add_request(opened("runs", last=True))
    steps(scheduler, most=3)
    scheduler.set_pause_state(PauseState.PAUSED_NEW)
    steps(scheduler, most=100)
    assert list(scheduler.requests) == ["stuck"], "the pause waits for a request that has its input"
    assert not scheduler.has_requests() and scheduler.get_request_counts() == (0, 1)
    assert scheduler.kv_cache_manager.usage == 0
    scheduler.add_request(chunk("stuck", step_inputs=1))
    assert not scheduler.has_requests(), "a chunk starts no request during the pause"
    scheduler.set_pause_state(PauseState.UNPAUSED)
    assert scheduler.has_requests()
    steps(scheduler)
    assert scheduler.requests["stuck"].num_computed_tokens == SIZE - 1
    scheduler.add_request(chunk("stuck", prompt_positions=1))
    assert steps(scheduler) == [{"stuck": 1}, {"stuck": 1}]


def test_a_request_that_waits_gets_a_place_that_became_free_during_a_pause(scheduler: Any) -> None:
    for name in ("first", "second"):
        scheduler.add_request(opened(name, prompt_positions=SIZE - 1))
    scheduler.add_request(opened("third", prompt_positions=SIZE))
    assert "third" not in {name for step in steps(scheduler) for name in step}
    assert not scheduler.has_requests(), "the others have both places"
    scheduler.set_pause_state(PauseState.PAUSED_ALL)
    scheduler.finish_requests("first", RequestStatus.FINISHED_ABORTED)
    assert steps(scheduler) == [] and not scheduler.has_requests()
    scheduler.set_pause_state(PauseState.UNPAUSED)
    assert steps(scheduler) == [{"third": BUDGET}, {"third": SIZE - BUDGET}]


def test_a_pause_waits_for_a_step_that_is_under_way(scheduler: Any) -> None:
    scheduler.add_request(opened(prompt_positions=SIZE - 1))
    scheduler.schedule()
    output = scheduler.schedule()
    assert output.num_scheduled_tokens
    scheduler.set_pause_state(PauseState.PAUSED_NEW)
    scheduler.schedule()
    assert scheduler.running


def test_requests_of_a_dead_api_server_end_also_while_they_wait_for_input(scheduler: Any) -> None:
    watched = ReplicaAgent(scheduler)
    for client, name in enumerate(("of another", "of the dead one")):
        running = opened(f"running {name}", prompt_positions=4, client=client)
        for request in (running, opened(name, hidden_spans=((0, 5),), client=client)):
            assert not watched.intercept(request)
            scheduler.add_request(request)
        scheduler.add_request(chunk(name))
    scheduler.schedule()
    load = watched.load()
    assert load is not None and (load.running, load.waiting) == (2, 2)
    assert watched.intercept(Request.from_engine_core_request(abort_client(1, 100.0), None))
    load = watched.load()
    assert load is not None and (load.running, load.waiting) == (1, 1)
    assert set(scheduler._parked) == {"of another"} == set(scheduler._chunks)
    assert set(scheduler._progress) == {"of another", "running of another"}
