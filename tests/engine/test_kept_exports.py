"""Hidden states of earlier prompts are kept: every request exports each of its hidden states once, in order.

`World` is a scheduler and a worker without vLLM: prompts of a few token ids, so that many begin alike, blocks hashed as
vLLM does, and hidden states that are a function of all tokens up to their position.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tests.engine.schedulers import runner_output, stage_config
from vllm_omni_ext.config.schema import OUTGOING
from vllm_omni_ext.engine.exporter import Exporter
from vllm_omni_ext.engine.input_provider import Span, scheduled_starts
from vllm_omni_ext.engine.kept_exports import KeptBlocks, KeptHiddenStates, RequestBlocks, StepChanges
from vllm_omni_ext.engine.scheduler import export_scheduler
from vllm_omni_ext.wire.envelope import HiddenStatesChunkReady, pack, unpack
from vllm_omni_ext.wire.stage_input import EXPORT

SIZE = 4
MEDIA = 9
"""Token id of positions whose hidden states are exported."""

Prompt = tuple[int, ...]


def ranges_of(prompt: Prompt) -> tuple[tuple[int, int], ...]:
    return tuple((at, at + 1) for at, token in enumerate(prompt) if token == MEDIA)


def hidden_of(prompt: Prompt, start: int, stop: int) -> torch.Tensor:
    """Rows [position, a number that depends on all tokens up to it]."""
    return torch.tensor([[p, hash(prompt[: p + 1]) % 1000] for p in range(start, stop)]).view(stop - start, 2)


@dataclass
class Running:
    prompt: Prompt
    blocks: RequestBlocks
    at: int = 0
    exported: list[torch.Tensor] = field(default_factory=list)


class World:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.kept, self.store, self.exporter = KeptBlocks(capacity, SIZE), KeptHiddenStates(), Exporter()
        self.cached: set[Prompt] = set()
        self.running: dict[str, Running] = {}
        self.restored = 0

    def open(self, name: str, prompt: Prompt) -> None:
        hashes = [prompt[: end + SIZE] for end in range(0, len(prompt) - SIZE + 1, SIZE)]
        self.running[name] = Running(prompt, RequestBlocks(ranges_of(prompt), hashes, SIZE))

    def hit(self, prompt: Prompt) -> int:
        ends = range(SIZE, len(prompt), SIZE)
        return next((end - SIZE for end in ends if prompt[:end] not in self.cached), (len(prompt) - 1) // SIZE * SIZE)

    def step(self, counts: dict[str, int]) -> None:
        changes, spans = StepChanges(), []
        due = {name: count for name, count in counts.items() if name in self.running and count}
        for name in due:
            each = self.running[name]
            self.exporter.add(name, ranges_of(each.prompt))
            if each.at == 0:
                each.at = self.kept.covered(each.blocks, self.hit(each.prompt))
            if each.at > each.blocks.computed and (slots := self.kept.restore(each.blocks, each.at)):
                changes.restore[name] = each.at, slots
        for name, count in due.items():
            each = self.running[name]
            stop = min(each.at + count, len(each.prompt))
            if parts := self.kept.compute(each.blocks, each.at, stop):
                changes.keep[name] = parts
            spans.append(Span(name, each.at, stop - each.at))
            self.cached |= {each.prompt[:end] for end in range(SIZE, stop + 1, SIZE)}
            each.at = stop
        changes.free = self.kept.take_freed()
        self._work(changes, spans)

    def _work(self, changes: StepChanges, spans: list[Span]) -> None:
        for name, (start, slots) in changes.restore.items():
            found = self.exporter.restore(name, start)
            if found is not None:
                part = self.store.restore(slots)[found[0] :]
                assert len(part)
                self.restored += len(part)
                self.running[name].exported.append(part)
        rows = [hidden_of(self.running[s.req_id].prompt, s.start, s.start + s.count) for s in spans]
        hidden = torch.cat([torch.empty(0, 2, dtype=torch.long), *rows])
        cuts = self.exporter.cut(spans, hidden)
        for name, cut in cuts.items():
            self.running[name].exported.append(cut.hidden_states)
            for start, stop, slot in changes.keep.get(name, ()):
                at = self.exporter.rows(name, start, stop)
                assert at.start >= cut.first and at.stop - cut.first <= len(cut.hidden_states)
                self.store.keep(slot, cut.hidden_states[at.start - cut.first : at.stop - cut.first])
        self.store.free(changes.free)
        assert self.kept.rows <= self.capacity
        assert sum(len(self.store.restore([slot])) for slot in self.store._pieces) <= self.capacity

    def reset(self) -> None:
        self.kept.clear()
        for each in self.running.values():
            self.kept.close(each.blocks)
        self.cached.clear()

    def close(self, name: str) -> Running:
        each = self.running.pop(name)
        self.kept.close(each.blocks)
        self.exporter.drop(name)
        return each


prompts = st.lists(st.sampled_from([1, MEDIA]), min_size=1, max_size=5 * SIZE).map(tuple)
steps = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from(["run", "preempt", "abort", "reset", "evict"]), st.integers(1, 9)),
    max_size=30,
)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.lists(prompts, min_size=1, max_size=8), steps, st.integers(0, 40))
def test_a_request_exports_each_hidden_state_once_in_order(
    given_prompts: list[Prompt], actions: list[tuple[int, str, int]], capacity: int
) -> None:
    world = World(capacity)
    for index, prompt in enumerate(given_prompts):
        world.open(f"r{index}", prompt)
    for target, action, count in actions:
        name = f"r{target}"
        if action == "reset":
            world.reset()
        elif action == "evict":
            world.cached = {each for each in world.cached if len(each) > count}
        elif name in world.running and action == "preempt":
            world.running[name].at = 0
        elif name in world.running and action == "abort":
            world.close(name)
        elif action == "run":
            world.step({name: count, f"r{target + 1}": count})
    for name in list(world.running):
        while world.running[name].at < len(world.running[name].prompt):
            world.step({name: 7})
        done = world.close(name)
        rows = hidden_of(done.prompt, 0, len(done.prompt))
        expected = rows[[position for position, _ in ranges_of(done.prompt)]]
        assert torch.equal(torch.cat([rows[:0], *done.exported]), expected)
    world.kept.clear()
    assert world.kept.rows == 0
    world.store.free(world.kept.take_freed())
    assert not len(world.store)


def test_a_second_turn_restores_the_first_one() -> None:
    world, first = World(100), (1, MEDIA, MEDIA, 1) * 3
    world.open("a", first)
    world.step({"a": 12})
    world.close("a")
    world.open("b", (*first, MEDIA, 1))
    world.step({"b": 2})
    assert world.restored == 6 and world.close("b").at == 14


def test_the_least_recently_used_blocks_are_freed() -> None:
    world = World(8)
    for name, token in (("a", 1), ("b", 2), ("a again", 1), ("c", 3)):
        world.open(name, (token, MEDIA, MEDIA, MEDIA, 1))
        world.step({name: 5})
        world.close(name)
    assert world.restored == 3
    world.open("b again", (2, MEDIA, MEDIA, MEDIA, 1))
    world.step({"b again": 5})
    assert world.restored == 3, "b was used least recently"
    assert world.kept.rows == 6


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmConfig]:
    engine = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "max_model_len": 256, "block_size": 32}
    with stage_config(tmp_path_factory.mktemp("tiny"), "talker", **engine) as made:
        yield made


def scheduler_of(config: VllmConfig, monkeypatch: pytest.MonkeyPatch, *, mib: int, caching: bool = True) -> Any:
    monkeypatch.setitem(config.additional_config, OUTGOING, {"hidden_states": {"kept_bytes": mib << 20}})
    monkeypatch.setattr(config.cache_config, "enable_prefix_caching", caching)
    monkeypatch.setattr(config.cache_config, "num_gpu_blocks", 40)
    size = config.cache_config.block_size
    layer = FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=1, dtype=torch.float32)
    return export_scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(40, [], [KVCacheGroupSpec(["layer"], layer)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=size,
        log_stats=True,
    )


def request(name: str, prompt: list[int], spans: list[list[int]], **more: Any) -> Request:
    init_none_hash(sha256)
    extra = {EXPORT: spans} if spans else None
    params = SamplingParams(max_tokens=2, extra_args=extra, skip_reading_prefix_cache=bool(spans) or None, **more)
    return Request(name, prompt, params, None, block_hasher=get_request_block_hasher(32, sha256))


def run(scheduler: Any, made: Request) -> list[Any]:
    """Run a request to its end; return (first position, tokens, what the worker restores and keeps) of its steps."""
    scheduler.add_request(made)
    seen = []
    while made.request_id in scheduler.requests:
        output = scheduler.schedule()
        if count := output.num_scheduled_tokens.get(made.request_id):
            changes = output.kept
            new = [each.num_computed_tokens for each in output.scheduled_new_reqs]
            seen.append((new, count, changes.restore, changes.keep))
            done = made.num_computed_tokens >= made.num_prompt_tokens
            scheduler.update_from_output(output, runner_output([made.request_id], [[5] if done else []]))
    return seen


PROMPT = [1] * 40 + [2] * 60
SPANS = [[40, 90]]


def test_an_exporting_request_reads_the_prefix_cache_as_far_as_its_hidden_states_are_kept(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = scheduler_of(config, monkeypatch, mib=1)
    first = run(scheduler, request("a", PROMPT, SPANS))
    assert [step[:2] for step in first] == [([0], 64), ([], 36), ([], 1)]
    assert first[0][3] == {"a": [(32, 64, 0)]} and first[1][3] == {"a": [(64, 96, 1)]}
    second = run(scheduler, request("b", [*PROMPT, 3], SPANS))
    assert second[0] == ([96], 5, {"b": (96, [0, 1])}, {})
    text = run(scheduler, request("c", [*PROMPT, 4], []))
    assert text[0] == ([96], 5, {}, {}), "a prompt without exports is not shortened"


@pytest.mark.parametrize("logprobs", [{"prompt_logprobs": 0}, {"prompt_logprob_token_ids": [[1]]}])
def test_a_prompt_with_logprobs_is_computed_from_its_beginning(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, logprobs: dict[str, Any]
) -> None:
    scheduler = scheduler_of(config, monkeypatch, mib=1)
    run(scheduler, request("a", PROMPT, SPANS))
    assert run(scheduler, request("b", [*PROMPT, 3], SPANS, **logprobs))[0][:3] == ([0], 64, {})


def test_statistics_of_a_prompt_are_sent_once_and_with_the_first_token(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client gets no output that has only hidden states."""
    scheduler = scheduler_of(config, monkeypatch, mib=1)
    made, seen = request("a", PROMPT, [[40, 100]]), []
    scheduler.add_request(made)
    while "a" in scheduler.requests:
        output = scheduler.schedule()
        sampled = [5] if made.num_computed_tokens >= len(PROMPT) else []
        exported = pack(HiddenStatesChunkReady(source="s", name="0/a", first=0, count=1))
        for group in scheduler.update_from_output(output, runner_output(["a"], [sampled], [exported])).values():
            for each in group.outputs:
                events = [event.type.name for event in each.events or ()]
                seen.append((each.new_token_ids, events, each.prefill_stats and each.prefill_stats.num_prompt_tokens))
    assert seen == [([], [], None), ([5], ["QUEUED", "SCHEDULED"], 100), ([5], [], None)]


def test_without_kept_hidden_states_only_the_text_before_media_is_read_from_the_prefix_cache(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = scheduler_of(config, monkeypatch, mib=0)
    run(scheduler, request("a", PROMPT, SPANS))
    assert run(scheduler, request("b", [*PROMPT, 3], SPANS))[0][:3] == ([32], 64, {})


def test_a_reset_of_the_prefix_cache_frees_kept_hidden_states(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = scheduler_of(config, monkeypatch, mib=1)
    run(scheduler, request("a", PROMPT, SPANS))
    assert scheduler.reset_prefix_cache()
    scheduler.add_request(request("b", [*PROMPT, 3], SPANS))
    output = scheduler.schedule()
    assert output.scheduled_new_reqs[0].num_computed_tokens == 0
    assert output.kept.free == [1, 0] and not output.kept.restore


def within_a_block(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A scheduler whose last step ended within a block that is to be kept."""
    scheduler = scheduler_of(config, monkeypatch, mib=1)
    for each in (request("short", [1] * 10, []), request("a", PROMPT, SPANS)):
        scheduler.add_request(each)
    output = scheduler.schedule()
    assert output.kept.keep == {"a": [(32, 54, 0)]}, "the step ends within the block"
    scheduler.update_from_output(output, runner_output(["short", "a"], [[5], []]))
    return scheduler


def test_a_block_that_was_begun_before_a_reset_is_not_kept(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its hidden states from before and after the reset may be those of different weights."""
    scheduler = within_a_block(config, monkeypatch)
    assert scheduler.reset_prefix_cache(True) and scheduler._kept.rows == 0
    freed, kept = [], []
    while "a" in scheduler.requests:
        output = scheduler.schedule()
        freed += output.kept.free
        kept += output.kept.keep.get("a", [])
        names = list(output.num_scheduled_tokens)
        done = [scheduler.requests[each].num_computed_tokens >= 100 or each == "short" for each in names]
        scheduler.update_from_output(output, runner_output(names, [[5] if each else [] for each in done]))
    assert freed == [0] and kept == [(64, 96, 1)]
    assert run(scheduler, request("b", [*PROMPT, 3], SPANS))[0][:3] == ([32], 64, {})


@pytest.mark.parametrize("before", [0, 1])
def test_a_reset_during_a_step_loses_no_exported_hidden_states(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, before: int
) -> None:
    """vLLM drops the output of the step; the worker does not export again what the step has exported."""
    monkeypatch.setattr(config.scheduler_config, "async_scheduling", True)
    scheduler, exporter = scheduler_of(config, monkeypatch, mib=1), Exporter()
    scheduler.add_request(request("a", PROMPT, SPANS))
    seen: list[tuple[int, int, list[int]]] = []

    def execute(output: Any) -> Any:
        exporter.add("a", [(40, 90)])
        names = list(output.num_scheduled_tokens)
        span = Span("a", scheduled_starts(output)["a"], output.num_scheduled_tokens["a"])
        cut = exporter.cut([span], torch.zeros(span.count, 2)).get("a")
        message = cut and pack(
            HiddenStatesChunkReady(source="s", name="0/a", first=cut.first, count=len(cut.hidden_states))
        )
        return runner_output(names, [[5] if span.start + span.count >= len(PROMPT) else []], [message])

    def update(output: Any, results: Any) -> None:
        for group in scheduler.update_from_output(output, results).values():
            for each in group.outputs:
                if each.pooling_output is not None:
                    ready = unpack(each.pooling_output)
                    seen.append((ready.first, ready.count, each.new_token_ids))

    for _ in range(before):
        update(output := scheduler.schedule(), execute(output))
    output = scheduler.schedule()
    results = execute(output)
    assert scheduler.reset_prefix_cache(True)
    update(output, results)
    while "a" in scheduler.requests:
        update(output := scheduler.schedule(), execute(output))
    assert seen == [(0, 24, []), (24, 26, [] if before else [5])]
    assert not scheduler._orphaned


def test_an_engine_without_prefix_cache_keeps_nothing(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = scheduler_of(config, monkeypatch, mib=1, caching=False)
    assert all(not step[3] for step in run(scheduler, request("a", PROMPT, SPANS)))


def test_an_aborted_request_leaves_no_part_of_a_block(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = within_a_block(config, monkeypatch)
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert scheduler.schedule().kept.free == [0] and scheduler._kept.rows == 0
