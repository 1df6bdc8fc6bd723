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
        """vLLM's logger, with each engine's cache info from its own config, and only tokens written for `StepTokens`.

        Adding zero to all other metrics would show the same, but take time in every step.
        """

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
            super().record(scheduler_stats, None, mm_cache_stats, engine_idx)
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
