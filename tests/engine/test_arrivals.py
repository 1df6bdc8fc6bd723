"""A request whose hidden states are being read takes part in no step; the others do, and the engine does not spin.

vLLM's own scheduler, without a model; the receiver of hidden states is `tests.engine.schedulers.Arrivals`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from queue import Queue
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tests.engine.schedulers import Arrivals, runner_output, stage_config
from tests.support.examples import examples
from vllm_omni_ext.config.schema import INCOMING
from vllm_omni_ext.engine import core_queue
from vllm_omni_ext.engine.edge_receiver import Lost
from vllm_omni_ext.engine.input_provider import scheduled_starts
from vllm_omni_ext.engine.scheduler import streaming_input_scheduler
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.wire.envelope import StageError, pack
from vllm_omni_ext.wire.stage_input import CHUNK, INPUT, HiddenStatesRef, StageInput

SIZE, SPAN = 20, (3, 13)
BUDGET, FRAMES, BLOCKS, SEQUENCES = 16, 6, 60, 4
IDLE_STEPS = 3
"""Most steps without tokens one after the other: one to report ended requests, two in which vLLM holds a request."""
STATES = SPAN[1] - SPAN[0]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmConfig]:
    engine = {"max_num_batched_tokens": BUDGET, "max_num_seqs": SEQUENCES, "max_model_len": 64}
    with stage_config(tmp_path_factory.mktemp("tiny"), "talker", **engine) as made:
        yield made


def scheduler_of(config: VllmConfig) -> Any:
    size = config.cache_config.block_size
    layer = FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=1, dtype=torch.float32)
    config.cache_config.num_gpu_blocks = BLOCKS
    return streaming_input_scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer"], layer)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=size,
    )


@pytest.fixture(scope="module")
def new_world(config: VllmConfig) -> Callable[[], World]:
    return lambda: World(scheduler_of(config))


def request(name: str, key: str, given: StageInput) -> Request:
    params = SamplingParams(max_tokens=FRAMES, extra_args={key: given}, ignore_eos=True)
    return Request(name, [0] * (SIZE if key == INPUT else 1), params, None)


class World:
    """Requests of a scheduler whose hidden states are read when a test calls `arrive`."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.arrivals = scheduler._receiver = Arrivals(at_once=False)
        self.announced: dict[str, int] = {}
        self.read: dict[str, int] = {}
        self.given: dict[str, list[float]] = {}
        self.hidden: set[str] = set()
        self.order: list[str] = []
        """Requests in the order in which they computed a frame."""

    def open(self, *, hidden: bool = True, count: int = 0) -> str:
        name = str(len(self.read))
        self.announced[name], self.read[name] = (count, 0) if hidden else (STATES, STATES)
        self.given[name] = []
        self.hidden |= {name} if hidden else set()
        ref = HiddenStatesRef(source="s", name=name, count=count) if count else None
        given = StageInput(hidden_spans=(SPAN,) if hidden else (), hidden_states=ref)
        self.scheduler.add_request(request(name, INPUT, given))
        return name

    def announce(self, name: str, count: int) -> None:
        if self.announced[name] == STATES:
            return
        self.announced[name] = min(STATES, self.announced[name] + count)
        ref = HiddenStatesRef(source="s", name=name, count=self.announced[name])
        chunk = StageInput(prompt_positions=0, hidden_states=ref)
        self.scheduler.add_request(request(name, CHUNK, chunk))

    def arrive(self, which: int = 0) -> None:
        count = self.arrivals.waiting[which][1]
        self.read[self.arrivals.read(which)] = count

    def step(self) -> dict[str, int]:
        output = self.scheduler.schedule()
        for name, found in output.arrived.items():
            assert output.num_scheduled_tokens[name]
            self.given[name] += torch.cat(found).view(-1).tolist()
        for name, start in scheduled_starts(output).items():
            stop = start + output.num_scheduled_tokens[name]
            needed = min(max(0, stop - SPAN[0]), STATES)
            hidden = name in self.hidden
            assert not hidden or len(self.given[name]) >= needed, "a hidden state is missing in the step"
            assert self.given[name] == [float(number) for number in range(len(self.given[name]))]
        names = list(output.num_scheduled_tokens)
        sampled = [[] if self.scheduler.requests[each].is_prefill_chunk else [7] for each in names]
        self.order += [name for name, tokens in zip(names, sampled, strict=True) if tokens]
        self.scheduler.update_from_output(output, runner_output(names, sampled))
        return dict(output.num_scheduled_tokens)

    def until_it_sleeps(self) -> list[str]:
        """Run steps until the engine would sleep; return the requests in the order in which they computed something."""
        computed: list[str] = []
        idle = 0
        while self.scheduler.has_requests():
            done = self.step()
            computed += done
            idle = 0 if done else idle + 1
            assert idle <= IDLE_STEPS, "the engine runs steps without work"
        return computed

    def waiting(self) -> set[str]:
        """Requests that wait for a place while others have all of them."""
        full = len(self.scheduler.running) == SEQUENCES
        return {each.request_id for each in self.scheduler.waiting} if full else set()

    def runnable(self) -> set[str]:
        """Requests with a position whose input has arrived."""
        found = set()
        for name, each in self.scheduler.requests.items():
            limit = SIZE + FRAMES if self.read[name] == STATES else SPAN[0] + self.read[name]
            if each.num_computed_tokens < limit:
                found.add(name)
        for name in self.scheduler._parked:
            if self.read[name]:
                found.add(name)
        return found


def test_a_full_engine_sleeps_while_all_its_requests_lack_input(new_world: Callable[[], World]) -> None:
    """One more request waits for a place; until a place is free or input arrives, steps would compute nothing."""
    world = new_world()
    running = [world.open() for _ in range(SEQUENCES)]
    waiting = world.open(hidden=False)
    assert world.until_it_sleeps() == running
    assert [each.request_id for each in world.scheduler.waiting] == [waiting]
    world.announce(running[0], 1)
    assert world.until_it_sleeps() == []
    world.arrive()
    assert world.until_it_sleeps() == running[:1]
    world.scheduler.finish_requests(running[1], RequestStatus.FINISHED_ABORTED)
    world.until_it_sleeps()
    assert world.order == [waiting] * FRAMES


def test_frames_of_others_go_on_while_a_chunk_is_read(new_world: Callable[[], World]) -> None:
    world = new_world()
    delayed, other = world.open(), world.open()
    world.announce(other, STATES)
    world.announce(delayed, STATES)
    world.arrive()
    world.until_it_sleeps()
    assert world.order == [other] * FRAMES and delayed in world.scheduler.requests
    world.arrive()
    world.until_it_sleeps()
    assert world.order == [other] * FRAMES + [delayed] * FRAMES


def test_a_request_whose_first_position_is_read_is_held_outside_of_the_queue(config: VllmConfig) -> None:
    scheduler = scheduler_of(config)
    arrivals = scheduler._receiver = Arrivals(at_once=False)
    ref = HiddenStatesRef(source="s", name="r", count=2)
    scheduler.add_request(request("r", INPUT, StageInput(hidden_spans=((0, 2),), hidden_states=ref)))
    assert not scheduler.has_requests() and scheduler.get_request_counts() == (0, 1)
    assert "r" not in scheduler.requests and scheduler.has_request("r") and not scheduler.has_request("other")
    arrivals.read(0)
    assert scheduler.has_requests() and scheduler.schedule().num_scheduled_tokens == {"r": BUDGET}


def test_lost_hidden_states_go_to_the_worker_and_its_error_ends_the_request(new_world: Callable[[], World]) -> None:
    world = new_world()
    name = world.open(count=STATES)
    world.step()
    assert not world.scheduler.has_requests()
    world.arrivals.read(0, lost=True)
    output = world.scheduler.schedule()
    assert output.arrived == {name: [Lost("gone")]}
    outputs = world.scheduler.update_from_output(output, runner_output([name], [[]], [pack(StageError("gone"))]))
    assert [str(each.finish_reason) for each in outputs[0].outputs] == ["error"]
    assert not world.scheduler.requests and not world.scheduler._arrived


def test_a_stage_without_a_tensor_edge_takes_chunks_but_no_hidden_states(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = {key: value for key, value in config.additional_config.items() if key != INCOMING}
    monkeypatch.setattr(config, "additional_config", without)
    scheduler = scheduler_of(config)
    scheduler.add_request(request("r", INPUT, StageInput(last=False)))
    scheduler.add_request(request("r", CHUNK, StageInput()))
    assert scheduler.has_requests()
    ref = HiddenStatesRef(source="s", name="n", count=1)
    with pytest.raises(ConfigError, match="no tensor edge"):
        scheduler.add_request(request("r", CHUNK, StageInput(hidden_states=ref)))
    scheduler.shutdown()


def test_an_arrival_wakes_the_engine_that_builds_the_scheduler() -> None:
    """The engine sleeps on its input queue, and drops this message."""

    class Engine(EngineCoreProc):
        def __init__(self) -> None:
            self.wake = core_queue.waker()

    engine = Engine.__new__(Engine)
    engine.input_queue = Queue()
    engine.__init__()  # type: ignore[misc]
    engine.wake()
    kind, message = engine.input_queue.get_nowait()
    assert kind == EngineCoreRequestType.WAKEUP
    assert EngineCoreProc._handle_client_request(engine, kind, message) is None
    core_queue.waker()()  # an engine without a queue


moves = st.lists(
    st.one_of(
        st.tuples(st.just("open"), st.booleans()),
        st.tuples(st.just("announce"), st.tuples(st.integers(0, 5), st.integers(1, STATES))),
        st.tuples(st.just("arrive"), st.integers(0, 5)),
        st.tuples(st.just("preempt"), st.integers(0, 3)),
        st.tuples(st.just("abort"), st.integers(0, 5)),
        st.tuples(st.just("step"), st.just(0)),
        st.tuples(st.just("step"), st.just(0)),
    ),
    min_size=5,
    max_size=40,
)


@settings(max_examples=examples(300), deadline=None)
@given(moves)
def test_every_step_has_only_requests_with_input_and_every_request_with_input_runs(
    new_world: Callable[[], World], plan: list[tuple[str, Any]]
) -> None:
    """In any order of announcements, arrivals, preemptions and ends; in the end all requests complete."""
    world = new_world()
    scheduler = world.scheduler
    aborted = set()
    for move, value in plan:
        live = sorted({*scheduler.requests, *scheduler._parked})
        if move == "open":
            world.open(hidden=value)
        elif move == "announce" and live:
            world.announce(live[value[0] % len(live)], value[1])
        elif move == "arrive" and world.arrivals.waiting:
            world.arrive(value % len(world.arrivals.waiting))
        elif move == "preempt" and scheduler.running:
            running = scheduler.running.pop(value % len(scheduler.running))
            scheduler._preempt_request(running, 0.0)
        elif move == "abort" and live:
            aborted.add(name := live[value % len(live)])
            scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        elif move == "step" and scheduler.has_requests():
            world.step()
    for name in sorted({*scheduler.requests, *scheduler._parked}):
        if world.announced[name] < STATES and world.read[name] < STATES:
            world.announce(name, STATES)
    idle = 0
    while scheduler.has_requests() or world.arrivals.waiting:
        if scheduler.has_requests():
            runnable, waiting = world.runnable(), scheduler.has_finished_requests() or len(scheduler.waiting)
            done = world.step()
            assert set(done) <= runnable
            idle = 0 if done else idle + 1
            assert idle <= IDLE_STEPS, "the engine runs steps without work"
            assert done or waiting or runnable
        else:
            assert world.runnable() <= world.waiting(), "the engine sleeps though a request could run"
            world.arrive()
    assert not scheduler.requests and not scheduler._parked and not scheduler._arrived
    counts = {name: world.order.count(name) for name in world.read if name not in aborted}
    assert set(counts.values()) <= {FRAMES}
