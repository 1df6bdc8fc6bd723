"""vLLM's own statistics, `vllm:*`, for the replicas of every stage."""

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
    """The number of each replica that a deployment has or may get, for the label `engine` of vLLM's metrics.

    A number follows from the plan and the replica's name alone, so all API servers use the same numbers. The planned
    replicas come first, the frontend's before the others' as in vLLM; then those that may join, one of each stage in
    turn.
    """

    def __init__(self, frontend: str, stages: Sequence[str], planned: Sequence[ReplicaId]) -> None:
        self._stages = tuple(stages)
        in_order = sorted(planned, key=lambda replica: replica.stage != frontend)
        self._numbers = {replica: number for number, replica in enumerate(in_order)}
        self._first_to_join = {
            stage: 1 + max((each.index for each in planned if each.stage == stage), default=-1) for stage in stages
        }

    def of(self, replica: ReplicaId) -> int:
        if replica in self._numbers:
            return self._numbers[replica]
        turn = replica.index - self._first_to_join[replica.stage]
        return len(self._numbers) + turn * len(self._stages) + self._stages.index(replica.stage)


class ReplicaLabels:
    """The metrics of a collector; those of vLLM with the label `engine` also have `stage` and `replica`.

    `REPLICA_INFO` among the metrics has the replica of each `engine`. A `stage` of vLLM's own stays.
    """

    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def collect(self) -> Iterator[Any]:
        """Yield the metrics, as prometheus_client's collectors do."""
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
    """vLLM's logger managers for all replicas, in the place of the one that `AsyncLLM` makes.

    One manager has the planned replicas. Each replica that joins later gets a manager of its own; its loggers replace
    earlier ones in the process's registry, but not in the files that API servers share.

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
        """Make the series of a replica that is connected, unless they exist."""
        number = self._numbers.of(replica)
        if number not in self._managers:
            self._managers[number] = self._manager([number])
        facts = {**config.cache_config.metrics_info(), ENGINE: str(number)}
        if (before := self._cache_info.get(number)) is not None:
            before.set(0)  # it may have come back with another cache
        if self._cache_metric is None:  # vLLM makes it for one config; here, each replica has its own
            name, text = "vllm:cache_config_info", "Information of the LLMEngine CacheConfig"
            self._cache_metric = Gauge(name, text, list(facts), multiprocess_mode="mostrecent")
        self._cache_info[number] = self._cache_metric.labels(**facts)
        self._cache_info[number].set(1)

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
        self._managers[engine_idx or 0].record(scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)

    def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
        """Record that all engines sleep, or are awake."""
        for manager in dict.fromkeys(self._managers.values()):
            manager.record_sleep_state(sleep, level)

    def record_admission_rejection(self, reason: str) -> None:
        """Record that vLLM's limit of queued requests has refused a request."""
        self._managers[0].record_admission_rejection(reason)

    def log(self) -> None:
        """Write the statistics to the log."""
        for manager in dict.fromkeys(self._managers.values()):
            manager.log()

    def note_sleep(self, replicas: Iterable[ReplicaId], level: int | None) -> None:
        """Set vLLM's sleep gauges of replicas to a level, None for awake; vLLM only sets those of all engines."""
        states = {"awake": level is None, "weights_offloaded": level == 1, "discard_all": level == 2}
        for number in map(self._numbers.of, replicas):
            for logger in self._managers[number].stat_loggers:
                for name, gauges in getattr(logger, "gauge_engine_sleep_state", {}).items():
                    gauges[number].set(states[name])


class ReplicaLogger(PrometheusStatLogger):
    """vLLM's logger for replicas whose states several API servers write.

    For `StepTokens`, only values that a step has changed are written. Unchanged values, or zero added, would show the
    same, but take time in every step.
    """

    _gauge_cls = StepGauge
    stats: ClassVar[ReplicaStats]
    alone: ClassVar[bool]
    """Whether no other process sets the same gauges."""

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
        """Record a step."""
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
        """Record that all engines sleep, or are awake."""
        if self.stats.sets_sleep:
            super().record_sleep_state(sleep, level)

    def log_engine_initialized(self) -> None:
        """Does nothing: each replica has a cache config of its own, see `ReplicaStats.add`."""


class NoSeries(PrometheusStatLogger):
    """Replaces the logger that `AsyncLLM` makes, whose values would stay in the shared files."""

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int] | None = None) -> None:
        pass

    def log_engine_initialized(self) -> None:
        pass


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

    vLLM's constructor makes eight objects, which are not read in most steps. They are made on the first access.
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
