"""What vLLM's loggers are told of stages that have no output processor of vLLM's."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import REGISTRY
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.stats import IterationStats, PrefixCacheStats, SchedulerStats

from vllm_omni_ext.observability.engine_stats import stats_of_all, tokens_of

STEPS = (3, 1, 0)


@pytest.fixture(scope="module")
def config(tiny: Path) -> VllmConfig:
    return AsyncEngineArgs(
        model=str(tiny), dtype="float32", enforce_eager=True, max_model_len=512, kv_cache_memory_bytes=64 << 20
    ).create_engine_config()


def written(engine: int) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every value of vLLM's metrics for one engine, by name and other labels."""
    return {
        (sample.name, tuple(sorted(item for item in sample.labels.items() if item[0] != "engine"))): sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name.startswith("vllm:") and sample.labels.get("engine") == str(engine)
        if not sample.name.endswith("_created")
    }


def test_tokens_of_a_step_are_written_as_vllm_writes_statistics_that_have_nothing_else(config: VllmConfig) -> None:
    stock, ours = 0, 1
    manager = stats_of_all(config, [config, config], client_count=1)
    for tokens in STEPS:
        stats = IterationStats()
        stats.num_generation_tokens = tokens
        manager.record(SchedulerStats(num_running_reqs=tokens), stats, engine_idx=stock)
        manager.record(SchedulerStats(num_running_reqs=tokens), tokens_of(made(tokens)), engine_idx=ours)
    assert written(ours) == written(stock)
    assert written(ours)["vllm:generation_tokens_total", (("model_name", config.model_config.model),)] == sum(STEPS)
    assert written(ours)["vllm:iteration_tokens_total_count", (("model_name", config.model_config.model),)] == len(
        STEPS
    )


STATES = (
    {"num_running_reqs": 1, "kv_cache_usage": 0.1},
    {"num_running_reqs": 1, "kv_cache_usage": 0.1},
    {
        "num_running_reqs": 1,
        "kv_cache_usage": 0.1,
        "prefix_cache_stats": PrefixCacheStats(requests=1, queries=9, hits=4),
    },
    {"num_running_reqs": 1, "kv_cache_usage": 0.2},
    {"num_running_reqs": 1, "kv_cache_usage": 0.2, "num_waiting_reqs": 2},
    {"num_running_reqs": 1, "kv_cache_usage": 0.2, "num_skipped_waiting_reqs": 2},
    {"num_running_reqs": 1, "num_kv_fetch_reqs_by_stage": {"loading": 1}},
    {"num_running_reqs": 1},
    {"num_running_reqs": 1, "prefix_cache_stats": PrefixCacheStats(requests=1, queries=3)},
    {"num_running_reqs": 1},
    {},
)


def test_a_scheduler_s_state_is_shown_after_each_step(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    stock, ours = 0, 1
    manager = stats_of_all(config, [config, config], client_count=1)
    stock_record, calls = PrometheusStatLogger.record, []
    monkeypatch.setattr(PrometheusStatLogger, "record", lambda *args: calls.append(args) or stock_record(*args))
    written_by_stock = 0
    for state in STATES:
        one = IterationStats()
        one.num_generation_tokens = 1
        manager.record(SchedulerStats(**state), one, engine_idx=stock)
        written_by_stock += 1
        manager.record(SchedulerStats(**state), tokens_of(made(1)), engine_idx=ours)
        assert written(ours) == written(stock), state
    assert len(calls) - written_by_stock == len(STATES) - 1, "a state that is shown already is not written again"


def made(tokens: int) -> EngineCoreOutputs:
    return EngineCoreOutputs(outputs=[EngineCoreOutput("a", [7] * tokens)])


def test_beside_other_api_servers_every_step_is_written(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """They set the same gauges."""
    manager, calls = stats_of_all(config, [config], client_count=2), []
    monkeypatch.setattr(PrometheusStatLogger, "record", lambda *args: calls.append(args))
    for _ in range(2):
        manager.record(SchedulerStats(), tokens_of(made(1)), engine_idx=0)
    assert len(calls) == 2
