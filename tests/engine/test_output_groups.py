"""Outputs of several steps in one message: no token is lost, doubled or late. vLLM's own scheduler, without a model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tests.engine.schedulers import runner_output, stage_config
from tests.support.examples import examples
from vllm_omni_ext.connectors.chunks import ChunkSchedule
from vllm_omni_ext.connectors.codec_stream import CodecStream
from vllm_omni_ext.connectors.playback import Player
from vllm_omni_ext.engine.output_groups import OutputGroup
from vllm_omni_ext.engine.scheduler import streaming_input_scheduler
from vllm_omni_ext.plugins.flow import Produced
from vllm_omni_ext.wire.envelope import StageError, StageProgress, pack, unpack
from vllm_omni_ext.wire.stage_input import CHUNK, INPUT, StageInput

GROUP, FRAMES, SEQUENCES, BLOCKS = 4, 11, 3, 60
RATE, HOP = 12.5, 2


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmConfig]:
    engine = {"max_num_batched_tokens": 16, "max_num_seqs": SEQUENCES, "max_model_len": 64}
    with stage_config(tmp_path_factory.mktemp("tiny"), "talker", **engine) as made:
        yield made


@pytest.fixture(scope="module", params=[False, True], ids=["one step at a time", "scheduled ahead"])
def new_engine(config: VllmConfig, request: pytest.FixtureRequest) -> Callable[[], Engine]:
    def new() -> Engine:
        size = config.cache_config.block_size
        layer = FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=1, dtype=torch.float32)
        config.cache_config.num_gpu_blocks = BLOCKS
        config.scheduler_config.async_scheduling = request.param
        config.cache_config.enable_prefix_caching = not request.param
        scheduler = streaming_input_scheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer"], layer)]),
            structured_output_manager=StructuredOutputManager(config),
            block_size=size,
        )
        return Engine(scheduler, ahead=request.param)

    return new


class Engine:
    """A scheduler whose steps sample the numbers 0, 1, ... for each request, with a frame [1, 1] of the same number."""

    def __init__(self, scheduler: Any, *, ahead: bool) -> None:
        self.scheduler, self._ahead = scheduler, ahead
        self._running: list[Any] = []
        self.made: dict[str, int] = {}
        self.sent: dict[str, list[int]] = {}
        self.sizes: list[int] = []
        self.ends: dict[str, str] = {}
        self.errors: set[str] = set()

    def open(self, name: str, inputs: int, *, group: int = GROUP) -> None:
        params = SamplingParams(max_tokens=FRAMES, ignore_eos=True)
        given = StageInput(step_inputs=inputs, last=inputs >= FRAMES, group=group)
        params.extra_args = {INPUT: given}
        self.made[name], self.sent[name] = 0, []
        self.scheduler.add_request(Request(name, [0] * 3, params, None))

    def extend(self, name: str, inputs: int, *, last: bool) -> None:
        params = SamplingParams(max_tokens=1, extra_args={CHUNK: StageInput(step_inputs=inputs, last=last)})
        self.scheduler.add_request(Request(name, [0], params, None))

    def step(self) -> None:
        """Schedule a step; update from it, or with `ahead` from the step before it."""
        scheduled = self.scheduler.schedule()
        if scheduled.num_scheduled_tokens:
            self._running.append(scheduled)
            if len(self._running) > self._ahead:
                self._update(self._running.pop(0))
        else:
            self._update(self._running.pop(0) if self._running else scheduled)

    def _update(self, step: Any) -> None:
        names = list(step.num_scheduled_tokens)
        tokens: list[list[int]] = []
        tensors: list[Any] = []
        for name in names:
            ended = name not in self.scheduler.requests
            tokens.append([] if ended else [self.made[name]])
            tensors.append(None if ended else torch.tensor([[self.made[name]]], dtype=torch.int32))
            if name in self.errors and not ended:
                tensors[-1] = pack(StageError("broken"))
            self.made[name] += not ended
        outputs = self.scheduler.update_from_output(step, runner_output(names, tokens, tensors))
        for group in outputs.values():
            assert group.outputs or group.finished_requests or group.scheduler_stats, "a message without content"
            for each in group.outputs:
                self._receive(each)

    def _receive(self, output: EngineCoreOutput) -> None:
        assert output.request_id not in self.ends, "an output comes after the last one"
        if output.finish_reason is not FinishReason.ERROR:
            assert output.pooling_output.view(-1).tolist() == output.new_token_ids
            self.sent[output.request_id] += output.new_token_ids
            self.sizes.append(len(output.new_token_ids))
        if output.finish_reason is not None:
            self.ends[output.request_id] = str(output.finish_reason)

    def until_it_sleeps(self) -> None:
        while self.scheduler.has_requests() or self._running:
            self.step()

    def check_nothing_is_held(self) -> None:
        for name, sent in self.sent.items():
            assert sent == list(range(len(sent)))
            if name in self.scheduler.requests:
                assert len(sent) == self.made[name], f"tokens of {name} are held while the engine sleeps"


def test_outputs_are_joined_and_the_last_one_is_not(new_engine: Callable[[], Engine]) -> None:
    engine = new_engine()
    engine.open("a", FRAMES)
    engine.open("single", FRAMES, group=1)
    engine.until_it_sleeps()
    assert engine.sent == {"a": list(range(FRAMES)), "single": list(range(FRAMES))}
    assert sorted(engine.sizes) == sorted([1] * FRAMES + [1, 4, 4, 1, 1])
    assert engine.ends == {"a": "length", "single": "length"}
    assert not engine.scheduler._groups


def test_frames_before_an_error_are_sent(new_engine: Callable[[], Engine]) -> None:
    engine = new_engine()
    engine.open("a", FRAMES)
    while engine.made["a"] < 3:
        engine.step()
    engine.errors.add("a")
    engine.until_it_sleeps()
    assert (engine.sent["a"], engine.ends) == ([0, 1, 2], {"a": "error"})


events = st.lists(
    st.tuples(st.sampled_from(["open", "extend", "last", "abort", "steps"]), st.integers(0, 5)), max_size=30
)


@given(events=events)
@settings(max_examples=examples(60), deadline=None)
def test_every_frame_is_sent_once_and_none_waits_for_input(
    new_engine: Callable[[], Engine], events: list[tuple[str, int]]
) -> None:
    engine, opened = new_engine(), 0
    for kind, number in events:
        known = [name for name in engine.sent if name in engine.scheduler.requests]
        name = known[number % len(known)] if known else ""
        if kind == "open":
            engine.open(str(opened), number)
            opened += 1
        elif kind == "steps":
            for _ in range(number):
                if engine.scheduler.has_requests() or engine._running:
                    engine.step()
        elif name and kind == "abort":
            engine.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        elif name:
            engine.extend(name, number, last=kind == "last")
    engine.until_it_sleeps()
    engine.check_nothing_is_held()
    assert all(size <= GROUP for size in engine.sizes)
    assert set(engine.scheduler._groups) <= engine.scheduler.requests.keys() | engine.scheduler._parked.keys()
    for name in list(engine.scheduler.requests):
        engine.extend(name, 0, last=True)
    engine.until_it_sleeps()
    engine.check_nothing_is_held()
    assert not engine.scheduler._groups and all(len(engine.sent[name]) == FRAMES for name in engine.ends)


def output(number: int) -> EngineCoreOutput:
    return EngineCoreOutput("a", [number], pooling_output=torch.tensor([[number]]))


@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=3),
    gaps=st.lists(st.tuples(st.integers(1, 40), st.floats(0.0, 1.0) | st.just(1.0)), min_size=1, max_size=6),
)
@settings(max_examples=examples(200), deadline=None)
def test_sound_never_pauses_because_frames_are_joined(sizes: list[int], gaps: list[tuple[int, float]]) -> None:
    """Frames come at most the time of one frame apart; a codec that takes no time turns their parts into sound.

    A frame's sound may wait for the frame after it, as `ChunkSchedule.due` states.
    """
    times = list(itertools.accumulate(gap / RATE for count, gap in gaps for _ in range(count)))
    stream = CodecStream("codec", ChunkSchedule(tuple(sizes), RATE), 25)
    group, player, messages = OutputGroup(most=stream.joined["group"], rate=RATE), Player(), 0
    for number, now in enumerate(times):
        last = number == len(times) - 1
        sent = list[EngineCoreOutput]()
        group.add(output(number), now, sent)
        if last:
            group.take(sent)
        for each in sent:
            messages += 1
            ends = last and each.new_token_ids[-1] == number
            part = stream.take(each.pooling_output.numpy(), last=ends, at=now)
            if part is not None:
                samples = np.repeat(np.array(part.prompt), HOP)
                piece = stream.receive(Produced("codec", payload=samples, finish="stop", part=part.part, at=now))
                assert piece is not None
                player.receive(len(samples) / (HOP * RATE), now)
    assert sum(player.silences) <= 1 / RATE + 1e-9
    assert stream.frames.count == len(times) and messages <= len(times)


def test_a_message_is_not_joined_with_frames() -> None:
    group, sent = OutputGroup(most=8, rate=0.0, began=0.0), list[EngineCoreOutput]()
    message = EngineCoreOutput("a", [1], pooling_output=pack(StageProgress(1, 2)))
    for each in (output(0), message, output(2), output(3)):
        group.add(each, 1.0, sent)
    group.take(sent)
    assert [each.new_token_ids for each in sent] == [[0], [1], [2, 3]]
    assert sent[1] is message and unpack(message.pooling_output) == StageProgress(1, 2)


def test_few_messages_are_sent_while_the_listener_has_sound() -> None:
    """A frame is made in 23 ms and played in 80 ms."""
    group, sent = OutputGroup(most=8, rate=RATE), list[EngineCoreOutput]()
    for number in range(100):
        group.add(output(number), number * 0.023, sent)
    assert len(sent) <= 25
