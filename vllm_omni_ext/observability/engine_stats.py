"""vLLM's own statistics, for the replicas of every stage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import Gauge
from vllm.config import VllmConfig
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.loggers import (
    PerEngineStatLoggerAdapter,
    PrometheusStatLogger,
    StatLoggerBase,
    StatLoggerManager,
    load_stat_logger_plugin_factories,
)
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

from vllm_omni_ext import metrics as m
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.metrics import Metrics
from vllm_omni_ext.observability.engine_numbers import EngineNumbers
from vllm_omni_ext.observability.engine_series import EngineSeries, registered
from vllm_omni_ext.observability.shown_states import ShownStates

CACHE_INFO = "cache_config"


class ReplicaStats(StatLoggerManager):
    """vLLM's loggers for all replicas. Recreates the metrics `vllm:*` of this process.

    A replica that joins later gets loggers of its own, which write to the same metrics. Stat logger plugins that take
    all engines together have only the planned replicas: vLLM passes the engines to them once.

    Args:
        config: the frontend's config, which names the model.
        replicas: config of each replica that is connected.
        planned: the replicas of the plan, connected or not.
        replaces: whether this API server replaces one that has died. Then it does not set all replicas to awake at its
            start, as vLLM does: the shared values that the others wrote last stay.
    """

    def __init__(
        self,
        config: VllmConfig,
        replicas: Mapping[ReplicaId, VllmConfig],
        numbers: EngineNumbers,
        *,
        planned: Iterable[ReplicaId],
        client_count: int,
        replaces: bool = False,
    ) -> None:
        self._config = config
        self._numbers = numbers
        self._joined: dict[int, list[StatLoggerBase]] = {}
        self._cache_info: dict[int, Any] = {}
        self._series = EngineSeries(numbers.replica)
        self._knows_sleep = not replaces
        self._logger_class = _replica_logger(self._series, lambda: self._knows_sleep, alone=client_count == 1)
        super().__init__(
            vllm_config=config,
            engine_idxs=sorted(map(numbers.of, planned)),
            custom_stat_loggers=[self._logger_class, *load_stat_logger_plugin_factories()],
            client_count=client_count,
        )
        self.log_engine_initialized()
        for replica, its_config in replicas.items():
            self.add(replica, its_config)
        self._knows_sleep = True

    def add(self, replica: ReplicaId, config: VllmConfig) -> None:
        """Make the series of a replica that is connected, unless they exist."""
        number = self._numbers.of(replica)
        if number not in self.engine_indexes and number not in self._joined:
            self._joined[number] = self._loggers_of_one(number)
        facts = {**config.cache_config.metrics_info(), "engine": str(number)}
        if (before := self._cache_info.get(number)) is not None:
            before.set(0)  # it may have come back with another cache
        gauge = self._series.make(
            Gauge,
            f"vllm:{CACHE_INFO}_info",
            "Information of the LLMEngine CacheConfig",
            facts,
            multiprocess_mode="mostrecent",
        )
        self._cache_info[number] = gauge.labels(**facts)
        self._cache_info[number].set(1)

    def _loggers_of_one(self, number: int) -> list[StatLoggerBase]:
        with registered():
            own: list[StatLoggerBase] = [self._logger_class(self._config, [number])]
        adapters = [each for each in self.stat_loggers if isinstance(each, PerEngineStatLoggerAdapter)]
        kinds = [type(next(iter(each.per_engine_stat_loggers.values()))) for each in adapters]
        return own + [kind(self._config, number) for kind in kinds]

    def joined(self, replica: ReplicaId, config: VllmConfig) -> None:
        """A replica's process is new, and so awake, even if an earlier one of its name was asleep."""
        self.add(replica, config)
        self.note_sleep([replica], None)

    def lost(self, replica: ReplicaId) -> None:
        """A replica's connection is closed: nothing runs or waits there. Its totals stay."""
        self.record(SchedulerStats(), None, engine_idx=self._numbers.of(replica))

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: Any = None,
        engine_idx: int | None = None,
    ) -> None:
        """Record a step of the engine with this number."""
        for each in self._loggers(engine_idx or 0):
            each.record(scheduler_stats, iteration_stats, mm_cache_stats, engine_idx or 0)

    def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
        """Record that all engines sleep, or are awake."""
        super().record_sleep_state(sleep, level)
        for each in self._of_joined():
            each.record_sleep_state(sleep, level)

    def log(self) -> None:
        """Write the statistics to the log."""
        super().log()
        for each in self._of_joined():
            each.log()

    def note_sleep(self, replicas: Iterable[ReplicaId], level: int | None) -> None:
        """Set vLLM's sleep gauges for some replicas; vLLM itself only sets them for all engines at once.

        Args:
            level: sleep level; None: awake.
        """
        states = {"awake": level is None, "weights_offloaded": level == 1, "discard_all": level == 2}
        for number in map(self._numbers.of, replicas):
            for logger in self._loggers(number):
                gauges = logger.gauge_engine_sleep_state if isinstance(logger, PrometheusStatLogger) else {}
                for name in gauges:
                    gauges[name][number].set(states[name])

    def _loggers(self, number: int) -> Iterable[StatLoggerBase]:
        joined = self._joined.get(number)
        return self.stat_loggers if joined is None else joined

    def _of_joined(self) -> list[StatLoggerBase]:
        return [logger for loggers in self._joined.values() for logger in loggers]


def _replica_logger(
    series: EngineSeries, knows_sleep: Callable[[], bool], *, alone: bool
) -> type[PrometheusStatLogger]:
    """Return the class of vLLM's logger that writes to these metrics.

    Args:
        knows_sleep: whether it writes to the sleep metrics.
        alone: no other process sets their gauges.
    """
    base: Any = series.logger_class()

    class ReplicaLogger(base):  # type: ignore[misc]
        """vLLM's logger; for `StepTokens`, only values that a step has changed are written.

        Unchanged values, or zero added, would show the same, but take time in every step.
        """

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._shown = ShownStates(alone=alone)

        def record(
            self,
            scheduler_stats: SchedulerStats | None,
            iteration_stats: IterationStats | None,
            mm_cache_stats: Any = None,
            engine_idx: int = 0,
        ) -> None:
            if not isinstance(iteration_stats, StepTokens):
                self._shown.forget(engine_idx)
                self._record(scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)
                return
            if scheduler_stats is not None and self._changes(scheduler_stats, engine_idx):
                self._record(scheduler_stats, None, None, engine_idx)
            self.counter_generation_tokens[engine_idx].inc(iteration_stats.num_generation_tokens)
            self.histogram_iteration_tokens[engine_idx].observe(iteration_stats.num_generation_tokens)

        def _record(self, stats: SchedulerStats | None, *others: Any) -> None:
            with m.StepGauge.state_after(0 if stats is None else stats.step_counter):
                super().record(stats, *others)

        def _changes(self, stats: SchedulerStats, number: int) -> bool:
            if adds_to_counters(stats):
                self._shown.forget(number)
                return True
            waiting = stats.num_waiting_reqs, stats.num_skipped_waiting_reqs
            state = stats.num_running_reqs, waiting, stats.kv_cache_usage, stats.num_kv_fetch_reqs_by_stage
            return self._shown.due(number, state, busy=stats.num_running_reqs > 0)

        def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
            if knows_sleep():
                super().record_sleep_state(sleep, level)

        def log_metrics_info(self, type: str, config_obj: Any) -> None:
            """Does nothing: each replica has a cache config of its own, see `ReplicaStats.add`."""

    return ReplicaLogger


def adds_to_counters(stats: SchedulerStats) -> bool:
    """Return whether vLLM's logger adds a scheduler's statistics to counters, or shows adapters' names."""
    cache = stats.prefix_cache_stats
    return bool(
        stats.connector_prefix_cache_stats or stats.spec_decoding_stats or stats.kv_connector_stats
        or stats.ec_connector_stats or stats.perf_stats or stats.kv_cache_eviction_events
        or stats.running_lora_adapters or stats.waiting_lora_adapters or cache.requests or cache.queries
    )  # fmt: skip


class StepTokens(IterationStats):
    """Statistics of a step that hold only `num_generation_tokens`.

    vLLM's constructor makes eight objects, which nobody reads in most steps. They are made on the first access.
    """

    def __init__(self, tokens: int) -> None:
        self.num_generation_tokens = tokens

    def __getattr__(self, name: str) -> Any:
        fields = vars(IterationStats())
        if name not in fields:
            raise AttributeError(f"'{type(self).__name__}' has no attribute '{name}'")
        self.__dict__.update({**fields, **self.__dict__})
        return fields[name]


def tokens_of(outputs: EngineCoreOutputs) -> StepTokens:
    """Statistics of one step of a stage without vLLM's output processor: its tokens (for a codec stage, frames)."""
    return StepTokens(sum(len(output.new_token_ids) for output in outputs.outputs))


def name_engine(metrics: Metrics, number: int, replica: ReplicaId) -> None:
    """Publish the replica of a value of the label `engine`."""
    metrics.of(m.REPLICA_INFO, str(number), replica.stage, str(replica)).set(1)
