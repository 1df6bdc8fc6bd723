"""Exports vLLM's own metrics, `vllm:*`, for the replicas of all stages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from prometheus_client import Gauge
from prometheus_client.registry import Collector
from vllm.config import VllmConfig
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.loggers import PrometheusStatLogger, StatLoggerManager, load_stat_logger_plugin_factories
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.metrics import REPLICA_INFO, ShownStates, StepGauge

ENGINE = "engine"


class EngineNumbers:
    """Numbers of all replicas, also of replicas that may join later, for the label `engine` of vLLM's metrics.

    The numbers depend only on the arguments and the replica's id, so all API servers use the same numbers. The P
    planned replicas have the numbers 0 to P - 1, those of the frontend first. The n-th replica that joins stage s of S
    stages (n and s from 0) has the number P + n * S + s.

    Args:
        frontend: name of the frontend stage.
        stages: names of all stages.
        planned: replicas that are started with the deployment.
    """

    def __init__(self, frontend: str, stages: Sequence[str], planned: Sequence[ReplicaId]) -> None:
        self._stages = tuple(stages)
        in_order = sorted(planned, key=lambda replica: replica.stage != frontend)
        self._numbers = {replica: number for number, replica in enumerate(in_order)}
        self._first_to_join = {
            stage: 1 + max((each.index for each in planned if each.stage == stage), default=-1) for stage in stages
        }

    def of(self, replica: ReplicaId) -> int:
        """Return the number of a replica."""
        if replica in self._numbers:
            return self._numbers[replica]
        turn = replica.index - self._first_to_join[replica.stage]
        return len(self._numbers) + turn * len(self._stages) + self._stages.index(replica.stage)


class ReplicaLabels:
    """Prometheus collector that adds the labels `stage` and `replica` to vLLM's metrics with the label `engine`.

    The metric `REPLICA_INFO` maps each value of `engine` to a replica. A label `stage` of vLLM's own is not changed.
    """

    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def collect(self) -> Iterator[Any]:
        """Yield the metrics of the wrapped collector with the added labels."""
        families = list(self._collector.collect())
        infos = (
            sample.labels for family in families if family.name == REPLICA_INFO.full_name for sample in family.samples
        )
        replicas = {info[ENGINE]: {"stage": info["stage"], "replica": info["replica"]} for info in infos}
        for family in families:
            if family.name.startswith("vllm:"):
                family.samples = [
                    sample._replace(labels={**replicas.get(sample.labels.get(ENGINE, ""), {}), **sample.labels})
                    for sample in family.samples
                ]
            yield family


class ReplicaStats:
    """Records vLLM's statistics of all replicas; replaces the `StatLoggerManager` that `AsyncLLM` creates.

    One StatLoggerManager serves all planned replicas, and each replica that joins later gets a StatLoggerManager of its
    own. The loggers of the newest manager replace the older ones in the process's registry, but not in the metric files
    that API servers share.

    Args:
        config: the frontend's config, which names the model.
        replicas: configs of the connected replicas.
        planned: the replicas that are started with the deployment, connected or not.
        client_count: number of API servers.
        replaces: whether this API server replaces an ended one. If so, it does not set all replicas to awake at its
            start as vLLM does, because the values that the other API servers wrote last are valid.
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
        self._cache_metric: Gauge | None = None
        self._cache_info: dict[int, Gauge] = {}
        self._logs = client_count == 1
        self._logger: type[ReplicaLogger] = type(
            "EngineLogger", (ReplicaLogger,), {"stats": self, "alone": client_count == 1}
        )
        self.sets_sleep = not replaces
        engines = sorted(map(numbers.of, planned))
        self._managers = dict.fromkeys(engines, self._manager(engines))
        for replica, its_config in replicas.items():
            self.add(replica, its_config)
        self.sets_sleep = True

    def _manager(self, engines: list[int]) -> StatLoggerManager:
        loggers = [self._logger, *load_stat_logger_plugin_factories()]
        manager = StatLoggerManager(self._config, engines, loggers, enable_default_loggers=self._logs)
        manager.log_engine_initialized()
        return manager

    def add(self, replica: ReplicaId, config: VllmConfig) -> None:
        """Create the time series of a connected replica, unless they exist; write its cache config as a metric."""
        number = self._numbers.of(replica)
        if number not in self._managers:
            self._managers[number] = self._manager([number])
        facts = {**config.cache_config.metrics_info(), ENGINE: str(number)}
        if (before := self._cache_info.get(number)) is not None:
            before.set(0)  # a restarted replica may have another cache config
        if self._cache_metric is None:  # vLLM's logger supports one config; replicas differ
            name, text = "vllm:cache_config_info", "Information of the LLMEngine CacheConfig"
            self._cache_metric = Gauge(name, text, list(facts), multiprocess_mode="mostrecent")
        self._cache_info[number] = self._cache_metric.labels(**facts)
        self._cache_info[number].set(1)

    def joined(self, replica: ReplicaId, config: VllmConfig) -> None:
        """Add a replica that has connected after the start, and set its sleep state to awake.

        Its process is new, and an earlier process of the same replica may have been asleep.
        """
        self.add(replica, config)
        self.note_sleep([replica], None)

    def lost(self, replica: ReplicaId) -> None:
        """Set the running and waiting requests of a disconnected replica to 0. Its counters do not change."""
        self.record(SchedulerStats(), None, engine_idx=self._numbers.of(replica))

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: Any = None,
        engine_idx: int | None = None,
    ) -> None:
        """Record the statistics of one step of the engine with the number `engine_idx`."""
        self._managers[engine_idx or 0].record(scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)

    def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
        """Set the sleep state of all engines."""
        for manager in dict.fromkeys(self._managers.values()):
            manager.record_sleep_state(sleep, level)

    def record_admission_rejection(self, reason: str) -> None:
        """Count a request that was refused by vLLM's limit of queued requests."""
        self._managers[0].record_admission_rejection(reason)

    def log(self) -> None:
        """Write the statistics to the log."""
        for manager in dict.fromkeys(self._managers.values()):
            manager.log()

    def note_sleep(self, replicas: Iterable[ReplicaId], level: int | None) -> None:
        """Set vLLM's sleep gauges of single replicas to a level (None: awake); vLLM only sets those of all engines."""
        states = {"awake": level is None, "weights_offloaded": level == 1, "discard_all": level == 2}
        for number in map(self._numbers.of, replicas):
            for logger in self._managers[number].stat_loggers:
                for name, gauges in getattr(logger, "gauge_engine_sleep_state", {}).items():
                    gauges[number].set(states[name])


class ReplicaLogger(PrometheusStatLogger):
    """vLLM's Prometheus logger, adapted to gauges that several API servers write.

    A step of a stage other than the frontend has statistics of type `StepTokens`. For these, only values that the step
    has changed are written, because each write takes time.
    """

    _gauge_cls = StepGauge
    stats: ClassVar[ReplicaStats]
    alone: ClassVar[bool]
    """Whether this process is the only one that sets the gauges, i.e. the only API server."""

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int] | None = None) -> None:
        super().__init__(vllm_config, engine_indexes)
        self._shown = ShownStates(alone=self.alone)

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Record the statistics of one step of the engine with the number `engine_idx`."""
        if not isinstance(iteration_stats, StepTokens):
            self._shown.reset(engine_idx)
            self._record(scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)
            return
        if scheduler_stats is not None and self._changes(scheduler_stats, engine_idx):
            self._record(scheduler_stats, None, None, engine_idx)
        self.counter_generation_tokens[engine_idx].inc(iteration_stats.num_generation_tokens)
        self.histogram_iteration_tokens[engine_idx].observe(iteration_stats.num_generation_tokens)

    def _record(self, stats: SchedulerStats | None, *others: Any) -> None:
        with StepGauge.state_after(0 if stats is None else stats.step_counter):
            super().record(stats, *others)

    def _changes(self, stats: SchedulerStats, number: int) -> bool:
        if adds_to_counters(stats):
            self._shown.reset(number)
            return True
        waiting = stats.num_waiting_reqs, stats.num_skipped_waiting_reqs
        state = stats.num_running_reqs, waiting, stats.kv_cache_usage, stats.num_kv_fetch_reqs_by_stage
        return self._shown.due(number, state, busy=stats.num_running_reqs > 0)

    def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
        """Set the sleep state of all engines, unless this API server replaces an ended one and is starting."""
        if self.stats.sets_sleep:
            super().record_sleep_state(sleep, level)

    def log_engine_initialized(self) -> None:
        """Do nothing: `ReplicaStats.add` writes the cache config of each replica."""


class NoSeries(PrometheusStatLogger):
    """Logger without time series, passed to `AsyncLLM`'s constructor instead of vLLM's logger.

    `ReplicaStats` creates the real loggers afterwards. Values of vLLM's logger would stay in the shared metric files.
    """

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int] | None = None) -> None:
        pass

    def log_engine_initialized(self) -> None:
        pass


def adds_to_counters(stats: SchedulerStats) -> bool:
    """Return whether the statistics change counters of vLLM's logger, or contain names of LoRA adapters."""
    cache = stats.prefix_cache_stats
    return bool(
        stats.connector_prefix_cache_stats or stats.spec_decoding_stats or stats.kv_connector_stats
        or stats.ec_connector_stats or stats.perf_stats or stats.kv_cache_eviction_events
        or stats.running_lora_adapters or stats.waiting_lora_adapters or cache.requests or cache.queries
    )  # fmt: skip


class StepTokens(IterationStats):
    """Statistics of a step with only `num_generation_tokens`; all other fields have vLLM's initial values.

    vLLM's constructor creates eight objects that most steps do not read. This class creates them at the first access to
    one of them.
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
    """Return statistics with the number of tokens (for a codec stage: frames) of one step.

    Used for all stages but the frontend, for which vLLM's output processor makes the statistics.
    """
    return StepTokens(sum(len(output.new_token_ids) for output in outputs.outputs))
