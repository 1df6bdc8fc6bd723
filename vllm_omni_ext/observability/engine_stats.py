"""vLLM's own statistics, for the replicas of every stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.loggers import PrometheusStatLogger, StatLoggerManager, load_stat_logger_plugin_factories
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

from vllm_omni_ext import metrics as m
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.metrics import Metrics


def engine_order(frontend: str, replicas: Sequence[ReplicaId]) -> tuple[ReplicaId, ...]:
    """All replicas in the order of vLLM's label `engine`: the frontend's come first, as in vLLM."""
    return tuple(sorted(replicas, key=lambda replica: replica.stage != frontend))


def stats_of_all(config: VllmConfig, configs: Sequence[VllmConfig], *, client_count: int) -> StatLoggerManager:
    """vLLM's loggers for several engines. Recreates the metrics `vllm:*` of this process.

    Args:
        config: the frontend's config, which names the model.
        configs: config of each engine, by its number.
    """

    class EveryReplica(PrometheusStatLogger):
        """vLLM's logger, with each engine's cache info from its own config.

        For `StepTokens`, only what a step has changed is written: the same values again, or zero added, would show the
        same, but take time in every step.
        """

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._written: dict[int, tuple[Any, ...]] = {}

        def record(
            self,
            scheduler_stats: SchedulerStats | None,
            iteration_stats: IterationStats | None,
            mm_cache_stats: Any = None,
            engine_idx: int = 0,
        ) -> None:
            if not isinstance(iteration_stats, StepTokens):
                super().record(scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)
                return
            state = None if client_count > 1 or scheduler_stats is None else state_of(scheduler_stats)
            if state is None or self._written.get(engine_idx) != state:
                super().record(scheduler_stats, None, mm_cache_stats, engine_idx)
                self._written[engine_idx] = state or ()
            self.counter_generation_tokens[engine_idx].inc(iteration_stats.num_generation_tokens)
            self.histogram_iteration_tokens[engine_idx].observe(iteration_stats.num_generation_tokens)

        def log_metrics_info(self, type: str, config_obj: Any) -> None:
            known = [{**each.cache_config.metrics_info(), "engine": str(at)} for at, each in enumerate(configs)]
            gauge = self._gauge_cls(
                name=f"vllm:{type}_info",
                documentation="Information of the LLMEngine CacheConfig",
                multiprocess_mode="mostrecent",
                labelnames=known[0].keys(),
            )
            for facts in known:
                gauge.labels(**facts).set(1)

    manager = StatLoggerManager(
        vllm_config=config,
        engine_idxs=list(range(len(configs))),
        custom_stat_loggers=[EveryReplica, *load_stat_logger_plugin_factories()],
        client_count=client_count,
    )
    manager.log_engine_initialized()
    return manager


def state_of(stats: SchedulerStats) -> tuple[Any, ...] | None:
    """What vLLM's logger sets for a scheduler's statistics; None if these also add to counters, or name adapters."""
    cache = stats.prefix_cache_stats
    added = (
        stats.connector_prefix_cache_stats or stats.spec_decoding_stats or stats.kv_connector_stats
        or stats.ec_connector_stats or stats.perf_stats or stats.kv_cache_eviction_events
        or stats.running_lora_adapters or stats.waiting_lora_adapters or cache.requests or cache.queries
    )  # fmt: skip
    if added:
        return None
    waiting = stats.num_waiting_reqs, stats.num_skipped_waiting_reqs
    return stats.num_running_reqs, *waiting, stats.kv_cache_usage, dict(stats.num_kv_fetch_reqs_by_stage)


def note_sleep(manager: StatLoggerManager, engines: Sequence[int], level: int | None) -> None:
    """Set vLLM's sleep gauges for some engines; vLLM itself only sets them for all engines at once.

    Args:
        engines: values of the label `engine`.
        level: sleep level; None: awake.
    """
    states = {"awake": level is None, "weights_offloaded": level == 1, "discard_all": level == 2}
    for logger in manager.stat_loggers:
        if isinstance(logger, PrometheusStatLogger):
            for engine in engines:
                for name, is_so in states.items():
                    logger.gauge_engine_sleep_state[name][engine].set(is_so)


class StepTokens(IterationStats):
    """Statistics that hold only `num_generation_tokens`."""


def tokens_of(outputs: EngineCoreOutputs) -> StepTokens:
    """Statistics of one step of a stage without vLLM's output processor: its tokens (for a codec stage, frames)."""
    stats = StepTokens()
    stats.num_generation_tokens = sum(len(output.new_token_ids) for output in outputs.outputs)
    return stats


def name_engines(metrics: Metrics, order: Sequence[ReplicaId]) -> None:
    """Publish which replica each value of the label `engine` stands for."""
    for number, replica in enumerate(order):
        metrics.of(m.REPLICA_INFO, str(number), replica.stage, str(replica)).set(1)
