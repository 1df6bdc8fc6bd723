"""The prefix cache of a stage whose input arrives in chunks: vLLM's own scheduler, without a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tests.engine.schedulers import Arrivals, runner_output, stage_config
from tests.support.examples import examples
from vllm_omni_ext.engine.input_provider import scheduled_starts
from vllm_omni_ext.engine.scheduler import streaming_input_scheduler
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.wire.envelope import StageError, pack
from vllm_omni_ext.wire.stage_input import CHUNK, INPUT, KEY_POSITIONS, HiddenStatesRef, StageInput

BLOCK, BLOCKS, BUDGET = 32, 12, 96


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmConfig]:
    engine = {"max_num_batched_tokens": BUDGET, "max_num_seqs": 4, "max_model_len": 256, "block_size": BLOCK}
    with stage_config(tmp_path_factory.mktemp("tiny"), "talker", **engine) as made:
        yield made


def scheduler_of(config: VllmConfig, size: int = BLOCK) -> Any:
    config.cache_config.num_gpu_blocks = BLOCKS
    layer = FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=1, dtype=torch.float32)
    made: Any = streaming_input_scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer"], layer)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=size,
    )
    made._receiver = Arrivals()
    return made


@pytest.fixture
def scheduler(config: VllmConfig) -> Any:
    return scheduler_of(config)


@pytest.fixture(scope="module")
def new_scheduler(config: VllmConfig) -> Callable[[], Any]:
    return lambda: scheduler_of(config)


def keys(words: str) -> tuple[bytes, ...]:
    """Keys of a prompt with a letter for the input of each `KEY_POSITIONS` positions."""
    return tuple(words[: count + 1].encode() for count in range(len(words)))


def opened(name: str, words: str, *, tail: int = 10, steps: int = 40, last: bool = True, **fields: Any) -> Request:
    init_none_hash(sha256)
    given = StageInput(last=last, step_inputs=steps, prefix_keys=keys(words), **fields)
    return Request(
        name,
        [0] * (len(words) * KEY_POSITIONS + tail),
        SamplingParams(max_tokens=40, extra_args={INPUT: given}, ignore_eos=True),
        None,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
    )


def chunk(name: str, hidden: int = 0, **fields: Any) -> Request:
    ref = HiddenStatesRef(source="s", name=name, count=hidden)
    given = StageInput(**{"prompt_positions": 0, "hidden_states": ref, "last": False, **fields})
    return Request(name, [0], SamplingParams(extra_args={CHUNK: given}), None)


def step(scheduler: Any, lost: tuple[str, ...] = ()) -> dict[str, tuple[int, int]]:
    """Run a step; return the first position and the number of positions of each request."""
    output = scheduler.schedule()
    starts = scheduled_starts(output)
    names = list(output.num_scheduled_tokens)
    sampled = [[] if scheduler.requests[name].is_prefill_chunk else [7] for name in names]
    result = runner_output(names, sampled)
    result.pooler_output = [pack(StageError("lost")) if name in lost else None for name in names]
    scheduler.update_from_output(output, result)
    return {name: (starts[name], output.num_scheduled_tokens[name]) for name in names}


def finish(scheduler: Any, name: str) -> None:
    scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)


def known(scheduler: Any, words: str) -> None:
    """Put the blocks of a prompt into the cache."""
    scheduler.add_request(opened("known", words))
    while scheduler.requests["known"].is_prefill_chunk or not scheduler.requests["known"].num_computed_tokens:
        step(scheduler)
    finish(scheduler, "known")
    step(scheduler)  # its end is sent to the worker


def test_a_prompt_with_equal_keys_computes_only_the_rest(scheduler: Any) -> None:
    known(scheduler, "aabb")
    scheduler.add_request(opened("second", "aabbcc"))
    assert step(scheduler) == {"second": (64, 42)}
    assert scheduler.requests["second"].prefill_stats is None, "its output has them"


def test_a_prompt_with_other_keys_or_without_keys_is_computed(scheduler: Any) -> None:
    """The token ids are those of every prompt."""
    known(scheduler, "aabb")
    scheduler.add_request(opened("other", "abbb"))
    scheduler.add_request(opened("no keys", "", tail=20))
    assert step(scheduler) == {"other": (0, 74), "no keys": (0, 20)}


def test_generated_tokens_are_not_cached(scheduler: Any) -> None:
    scheduler.add_request(opened("first", "aa", tail=4))
    for _ in range(40):
        step(scheduler)
    assert "first" not in scheduler.requests
    assert len(scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block) == 1


def test_a_prefix_in_the_cache_needs_no_hidden_states(scheduler: Any) -> None:
    """The request waits for the first position after it, and takes no step before."""
    known(scheduler, "aabb")
    scheduler.add_request(
        opened("second", "aabbcc", last=False, hidden_spans=((3, 60), (62, 90)), prompt_positions=100)
    )
    assert not scheduler.has_requests()
    assert scheduler.get_request_counts() == (0, 1)
    scheduler.add_request(chunk("second", hidden=30))
    assert not scheduler.has_requests()
    scheduler.add_request(chunk("second", hidden=60))
    assert step(scheduler) == {"second": (64, 1)}, "57 hidden states of the first span, 3 of the second"
    scheduler.add_request(chunk("second", hidden=85))
    assert step(scheduler) == {"second": (65, 35)}


def test_a_prefix_that_leaves_the_cache_meanwhile_is_computed(scheduler: Any) -> None:
    known(scheduler, "aabb")
    scheduler.add_request(opened("second", "aabbcc", last=False, hidden_spans=((3, 90),), prompt_positions=100))
    assert not scheduler.has_requests()
    assert scheduler.reset_prefix_cache()
    scheduler.add_request(chunk("second", hidden=20))
    assert step(scheduler) == {"second": (0, 23)}


def test_a_block_whose_next_position_lacks_its_input_is_left_in_the_cache(scheduler: Any) -> None:
    """Between the check and the step the cache got a block more."""
    known(scheduler, "aa")
    scheduler.add_request(opened("second", "aabbcc", last=False, hidden_spans=((64, 90),), prompt_positions=100))
    scheduler.add_request(opened("first", "aabb"))
    scheduler.waiting.remove_requests([scheduler.requests["second"]])
    step(scheduler)
    scheduler.waiting.prepend_request(scheduler.requests["second"])
    assert step(scheduler)["second"] == (32, 32)


def test_blocks_are_cached_after_the_step_that_computed_them(scheduler: Any) -> None:
    """Two equal prompts in one step: the second could read what is lost."""
    scheduler.add_request(opened("first", "aa"))
    scheduler.add_request(opened("second", "aa"))
    assert step(scheduler, lost=("first",)) == {"first": (0, 42), "second": (0, 42)}
    scheduler.add_request(opened("third", "aa"))
    assert step(scheduler)["third"] == (32, 10), "from the second"


def test_blocks_with_lost_hidden_states_are_not_cached(scheduler: Any) -> None:
    scheduler.add_request(opened("first", "aabbccdd", hidden_spans=((60, 120),), prompt_positions=138))
    scheduler.add_request(chunk("first", hidden=60))
    step(scheduler)
    step(scheduler, lost=("first",))
    assert "first" not in scheduler.requests
    scheduler.add_request(opened("second", "aabbccdd"))
    assert step(scheduler) == {"second": (96, 42)}, "the first step was complete"


def test_preempted_requests_read_their_blocks_from_the_cache(scheduler: Any) -> None:
    scheduler.add_request(opened("first", "aabb", last=False, steps=1))
    step(scheduler)
    step(scheduler)
    assert not scheduler.has_requests()
    scheduler.set_pause_state(PauseState.PAUSED_NEW)
    scheduler.schedule()
    scheduler.set_pause_state(PauseState.UNPAUSED)
    assert step(scheduler) == {"first": (64, 11)}, "the last position has a step input"


def test_blocks_of_the_wrong_size_are_refused(config: VllmConfig) -> None:
    with pytest.raises(ConfigError, match="block_size: 8 is not a multiple of 16"):
        scheduler_of(config, 8)


def test_steps_that_are_scheduled_ahead_are_refused_with_a_prefix_cache(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config.scheduler_config, "async_scheduling", True)
    with pytest.raises(ConfigError, match="set async_scheduling: false, or enable_prefix_caching: false"):
        scheduler_of(config)


@pytest.mark.parametrize("ahead", [False, True])
def test_without_a_prefix_cache_everything_is_computed(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    monkeypatch.setattr(config.cache_config, "enable_prefix_caching", False)
    monkeypatch.setattr(config.scheduler_config, "async_scheduling", ahead)
    scheduler = scheduler_of(config)
    known(scheduler, "aabb")
    scheduler.add_request(opened("second", "aabb"))
    assert step(scheduler) == {"second": (0, 74)}


prompts = st.sampled_from(["aa", "aab", "aabb", "aaba", "abbb", "aabbbb", "aabbab"])
moves = st.lists(
    st.one_of(
        st.tuples(st.just("open"), prompts),
        st.tuples(st.just("input"), st.integers(1, 60)),
        st.tuples(st.sampled_from(["step", "step", "lose", "preempt", "end"]), st.integers(0, 3)),
    ),
    min_size=10,
    max_size=40,
)


class World:
    """Requests of a scheduler, and the input from which each position of each block was computed."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.words: dict[str, str] = {}
        self.hidden: dict[str, int] = {}
        self._blocks: dict[int, list[str]] = {}

    def open(self, words: str) -> None:
        name = str(len(self.words))
        self.words[name], self.hidden[name] = words, 0
        spans = ((3, len(words) * KEY_POSITIONS),)
        self.scheduler.add_request(opened(name, words, last=False, steps=2, hidden_spans=spans))

    def running(self, which: int) -> str | None:
        names = [each.request_id for each in self.scheduler.running]
        return names[which % len(names)] if names else None

    def preempt(self, name: str) -> None:
        request = self.scheduler.requests[name]
        self.scheduler.running.remove(request)
        self.scheduler._preempt_request(request, 0.0)

    def input(self, count: int) -> None:
        """New hidden states for all requests."""
        for name in self.words:
            self.hidden[name] += count
            self.scheduler.add_request(chunk(name, hidden=self.hidden[name]))

    def step(self, lost: str | None = None) -> None:
        """Run a step; the hidden states of the request `lost` are lost."""
        output = self.scheduler.schedule()
        assert all(output.num_scheduled_tokens.values())
        for req_id, start in scheduled_starts(output).items():
            self._compute(req_id, start, output.num_scheduled_tokens[req_id], lost=req_id == lost)
        names = list(output.num_scheduled_tokens)
        sampled = [[] if self.scheduler.requests[each].is_prefill_chunk else [7] for each in names]
        result = runner_output(names, sampled)
        result.pooler_output = [pack(StageError("lost")) if each == lost else None for each in names]
        self.scheduler.update_from_output(output, result)

    def _compute(self, req_id: str, start: int, count: int, *, lost: bool) -> None:
        (ids,) = self.scheduler.kv_cache_manager.get_block_ids(req_id)
        words = self.words[req_id]
        keyed, stop = len(words) * KEY_POSITIONS, start + count
        inputs = [words[: p // KEY_POSITIONS + 1] if p < keyed else req_id for p in range(stop)]
        for position in range(start):
            read = self._blocks[ids[position // BLOCK]][position % BLOCK]
            assert lost or read == inputs[position], f"{req_id} reads {read} at {position}"
        assert all(p < 3 + self.hidden[req_id] for p in range(start, min(stop, keyed))), "a hidden state is missing"
        for position in range(start, stop):
            block = self._blocks.setdefault(ids[position // BLOCK], [""] * BLOCK)
            block[position % BLOCK] = "lost" if lost else inputs[position]


@pytest.mark.slow
@settings(max_examples=examples(1000))
@given(moves)
def test_every_block_was_computed_from_the_input_of_the_requests_that_read_it(
    new_scheduler: Callable[[], Any], plan: list[tuple[str, Any]]
) -> None:
    """Any order of openings, chunks, losses, preemptions and ends."""
    world = World(new_scheduler())
    for move, value in plan:
        if move == "open":
            world.open(value)
        elif move == "input":
            world.input(value)
        elif move in ("step", "lose"):
            if world.scheduler.has_requests():
                world.step(str(value) if move == "lose" else None)
        elif (name := world.running(value)) is not None:
            (world.preempt if move == "preempt" else partial(finish, world.scheduler))(name)
