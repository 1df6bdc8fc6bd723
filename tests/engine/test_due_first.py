"""The order of requests that are due at different times, and the size of a step: vLLM's scheduler, no model."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.pooling_params import PoolingParams
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from tests.engine.schedulers import runner_output, stage_config
from vllm_omni_ext.engine import scheduler as module
from vllm_omni_ext.engine.scheduler import due_first_scheduler


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmConfig]:
    with stage_config(tmp_path_factory.mktemp("tiny"), "code2wav", max_num_seqs=8) as made:
        yield made


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Replaces the scheduler's clock."""
    made = SimpleNamespace(now=0.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: made.now))
    return made


def build(config: VllmConfig) -> Any:
    config.cache_config.num_gpu_blocks = 1
    config.scheduler_config.enable_chunked_prefill = False  # as vLLM's engine does for a model without a KV cache
    return due_first_scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(1, [], []),
        structured_output_manager=StructuredOutputManager(config),
        block_size=config.cache_config.block_size,
    )


def add(scheduler: Any, name: str, due: int, tokens: int = 16) -> None:
    request = Request(
        request_id=name,
        prompt_token_ids=[0] * tokens,
        sampling_params=None,
        pooling_params=PoolingParams(task="token_embed"),
        priority=due,
        arrival_time=float(len(scheduler.requests)),
    )
    scheduler.add_request(request)


def step(scheduler: Any, clock: SimpleNamespace, token_s: float = 0.001) -> list[str]:
    """Return the requests of one step, whose tokens take `token_s` seconds each."""
    output = scheduler.schedule()
    names = list(output.num_scheduled_tokens)
    clock.now += output.total_num_scheduled_tokens * token_s
    scheduler.update_from_output(output, runner_output(names, [], [torch.zeros(1) for _ in names]))
    return names


def test_requests_are_scheduled_by_due_time_and_then_by_arrival(config: VllmConfig, clock: SimpleNamespace) -> None:
    scheduler = build(config)
    for name, due in (("late", 900), ("a", 500), ("b", 500), ("c", 500), ("first", 100)):
        add(scheduler, name, due)
    assert step(scheduler, clock) == ["first", "a", "b", "c", "late"]


def test_a_step_is_as_long_as_its_limit_allows(config: VllmConfig, clock: SimpleNamespace) -> None:
    """At a millisecond a token, one part of 16 fits into 25 ms; when tokens cost a twentieth of that, all do."""
    scheduler = build(config)
    add(scheduler, "teacher", 0)
    step(scheduler, clock)
    for number in range(4):
        add(scheduler, f"r{number}", number)
    assert step(scheduler, clock) == ["r0"]
    add(scheduler, "urgent", 0)
    assert step(scheduler, clock) == ["urgent"], "it waits for the step in progress only"
    assert [step(scheduler, clock) for _ in range(3)] == [["r1"], ["r2"], ["r3"]]
    for number in range(40):
        add(scheduler, f"quick{number}", number)
        step(scheduler, clock, token_s=0.00005)
    for number in range(4):
        add(scheduler, f"s{number}", number)
    assert step(scheduler, clock, token_s=0.00005) == ["s0", "s1", "s2", "s3"]


def test_a_request_that_is_larger_than_a_step_runs_alone(config: VllmConfig, clock: SimpleNamespace) -> None:
    scheduler = build(config)
    add(scheduler, "teacher", 0)
    step(scheduler, clock)
    add(scheduler, "large", 1, tokens=400)
    add(scheduler, "small", 2)
    assert [step(scheduler, clock), step(scheduler, clock)] == [["large"], ["small"]]
    assert not scheduler.has_unfinished_requests()


def test_first_come_first_served_is_stock_vllm(
    config: VllmConfig, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config.scheduler_config, "policy", "fcfs")
    scheduler = build(config)
    add(scheduler, "teacher", 0)
    step(scheduler, clock)
    for name, due in (("a", 900), ("b", 100), ("c", 500)):
        add(scheduler, name, due)
    assert step(scheduler, clock) == ["a", "b", "c"]
