"""vLLM's metrics of all replicas: their labels, and statistics of stages that vLLM's output processor skips."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, values
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.metrics import loggers
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.prometheus import get_prometheus_registry, unregister_vllm_metrics
from vllm.v1.metrics.stats import IterationStats, PrefixCacheStats, SchedulerStats

from vllm_omni_ext import metrics as metrics_module
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.metrics import REPLICA_INFO
from vllm_omni_ext.observability import engine_stats
from vllm_omni_ext.observability.engine_stats import EngineNumbers, ReplicaLabels, ReplicaStats, tokens_of

STAGES = ("text", "codes")
TEXT, CODES, JOINED = ReplicaId("text", 0), ReplicaId("codes", 0), ReplicaId("codes", 1)
TOKENS = "vllm:generation_tokens_total"


@pytest.fixture(scope="module")
def config(tiny: Path) -> VllmConfig:
    return AsyncEngineArgs(
        model=str(tiny), dtype="float32", enforce_eager=True, max_model_len=512, kv_cache_memory_bytes=64 << 20
    ).create_engine_config()


Make = Callable[..., ReplicaStats]


@pytest.fixture
def make_stats(config: VllmConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes statistics in files, as in a server."""
    monkeypatch.setenv(metrics_module.DIRECTORY, str(tmp_path))
    monkeypatch.setattr(values, "ValueClass", values.MultiProcessValue())
    info = REPLICA_INFO.make(CollectorRegistry())

    def make(connected: tuple[ReplicaId, ...] = (TEXT, CODES), client_count: int = 1, **more: Any) -> ReplicaStats:
        planned, configs = (TEXT, CODES), dict.fromkeys(connected, config)
        numbers = EngineNumbers("text", STAGES, planned)
        for replica in (TEXT, CODES, JOINED, ReplicaId("text", 1)):
            info.labels("m", str(numbers.of(replica)), replica.stage, str(replica)).set(1)
        return ReplicaStats(config, configs, numbers, planned=planned, client_count=client_count, **more)

    yield make
    unregister_vllm_metrics()


@pytest.fixture
def stats(make_stats: Make) -> ReplicaStats:
    return make_stats()


Values = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def written(replica: ReplicaId) -> Values:
    """Return all values of vLLM's metrics for one replica, by name and other labels."""
    own = {"engine", "stage", "replica"}
    return {
        (sample.name, tuple(sorted(item for item in sample.labels.items() if item[0] not in own))): sample.value
        for metric in ReplicaLabels(get_prometheus_registry()).collect()
        for sample in metric.samples
        if sample.name.startswith("vllm:") and sample.labels.get("replica") == str(replica)
        if not sample.name.endswith("_created")
    }


def one(name: str, replica: ReplicaId, **labels: str) -> float:
    values = written(replica).items()
    (found,) = [value for (known, rest), value in values if known == name and labels.items() <= set(rest)]
    return found


def step(stats: ReplicaStats, replica: ReplicaId, tokens: int, running: int = 1) -> None:
    outputs = EngineCoreOutputs(outputs=[EngineCoreOutput("a", [7] * tokens)])
    stats.record(SchedulerStats(num_running_reqs=running), tokens_of(outputs), engine_idx=stats._numbers.of(replica))


def test_statistics_of_a_step_have_all_fields_of_vllm() -> None:
    stats, empty = tokens_of(EngineCoreOutputs(outputs=[EngineCoreOutput("r", [7, 8])])), vars(IterationStats())
    assert stats.num_prompt_tokens == 0
    assert stats.finished_requests is stats.finished_requests
    assert vars(stats).keys() == empty.keys()
    assert stats.num_generation_tokens == 2
    with pytest.raises(AttributeError, match="no attribute 'num_typos'"):
        stats.num_typos  # noqa: B018


def test_a_replica_has_all_series_when_it_joins_and_keeps_its_totals_when_it_leaves(
    config: VllmConfig, stats: ReplicaStats
) -> None:
    assert written(JOINED) == {}
    for replica in (CODES, JOINED):
        stats.add(replica, config)
        step(stats, replica, 4, running=2)
        stats.lost(replica)
        assert one("vllm:num_requests_running", replica) == 0
        stats.add(replica, config)
        step(stats, replica, 1)
        assert (one(TOKENS, replica), one("vllm:num_requests_running", replica)) == (5, 1)
    assert written(JOINED).keys() == written(CODES).keys()
    assert one(TOKENS, TEXT) == 0


def test_a_planned_replica_that_is_connected_later_has_all_series(config: VllmConfig, make_stats: Make) -> None:
    later = make_stats(connected=(TEXT,))
    assert one(TOKENS, CODES) == 0
    assert "vllm:cache_config_info" not in {name for name, _ in written(CODES)}
    later.add(CODES, config)
    assert one("vllm:cache_config_info", CODES) == 1


def test_a_cache_of_another_size_replaces_the_earlier_size(config: VllmConfig, stats: ReplicaStats) -> None:
    other = config.__class__.__new__(config.__class__)
    other.__dict__.update(config.__dict__, cache_config=type(config.cache_config)(block_size=64))
    stats.add(JOINED, config)
    stats.add(JOINED, other)
    found = {dict(labels)["block_size"]: value for (name, labels), value in written(JOINED).items() if "_info" in name}
    assert found == {str(config.cache_config.block_size): 0, "64": 1}


def test_sleep_is_shown_for_the_replicas_that_sleep(config: VllmConfig, stats: ReplicaStats) -> None:
    stats.add(JOINED, config)

    def awake() -> list[float]:
        return [one("vllm:engine_sleep_state", each, sleep_state="awake") for each in (TEXT, CODES, JOINED)]

    stats.note_sleep([JOINED], 1)
    assert awake() == [1, 1, 0] and one("vllm:engine_sleep_state", JOINED, sleep_state="weights_offloaded") == 1
    stats.record_sleep_state(1, 2)
    assert awake() == [0, 0, 0]
    stats.note_sleep([TEXT, JOINED], None)
    assert awake() == [1, 0, 1]
    stats.joined(CODES, config)
    assert awake() == [1, 1, 1], "another process has its name"


def test_an_api_server_that_replaces_another_one_does_not_wake_replicas(config: VllmConfig, make_stats: Make) -> None:
    stats, later = make_stats(connected=(TEXT, CODES, JOINED), replaces=True), ReplicaId("text", 1)
    stats.add(later, config)
    shown = {
        each
        for each in (TEXT, CODES, JOINED, later)
        if "vllm:engine_sleep_state" in {name for name, _ in written(each)}
    }
    assert shown == {later} and one("vllm:engine_sleep_state", later, sleep_state="awake") == 1
    stats.record_sleep_state(0, 0)
    assert one("vllm:engine_sleep_state", JOINED, sleep_state="awake") == 1


class EngineLogger(loggers.StatLoggerBase):
    """A stat logger plugin for single engines."""

    made: ClassVar[list[tuple[int, list[Any]]]] = []

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self.steps: list[Any] = []
        self.made.append((engine_index, self.steps))

    def record(self, stats: Any, tokens: Any, mm_cache_stats: Any = None, engine_idx: int = 0) -> None:
        self.steps.append(engine_idx)

    def log_engine_initialized(self) -> None: ...


def test_plugins_for_single_engines_record_replicas_that_join(
    config: VllmConfig, make_stats: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_stats, "load_stat_logger_plugin_factories", lambda: [EngineLogger])
    stats = make_stats()
    stats.add(JOINED, config)
    for replica in (CODES, JOINED, JOINED):
        step(stats, replica, 1)
    assert EngineLogger.made == [(0, []), (1, [1]), (3, [3, 3])]


def test_a_label_stage_of_vllm_is_kept() -> None:
    registry = CollectorRegistry()
    Counter("vllm:x", "x", ("engine", "stage"), registry=registry).labels("1", "in_progress").inc()
    Counter("vllm:y", "y", ("engine",), registry=registry).labels("2").inc()
    Counter("other:z", "z", ("engine",), registry=registry).labels("1").inc()
    REPLICA_INFO.make(registry).labels("m", "1", "codes", "codes/0").set(1)
    samples = [sample for family in ReplicaLabels(registry).collect() for sample in family.samples]
    assert [sample.labels for sample in samples if sample.name.endswith("_total")] == [
        {"engine": "1", "stage": "in_progress", "replica": "codes/0"},
        {"engine": "2"},
        {"engine": "1"},
    ]


@given(
    planned=st.dictionaries(st.sampled_from("abc"), st.integers(0, 4)),
    joined=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 20))),
)
def test_every_replica_has_one_number_in_any_order_of_joining(
    planned: dict[str, int], joined: list[tuple[str, int]]
) -> None:
    known = [ReplicaId(stage, index) for stage, count in planned.items() for index in range(count)]
    numbers = EngineNumbers("b", "abc", known)
    names = [*known, *(ReplicaId(stage, index) for stage, index in joined)]
    assert len({numbers.of(name) for name in names}) == len(set(names))
    assert sorted(map(numbers.of, known)) == list(range(len(known)))
    assert {numbers.of(name).bit_length() < 10 for name in names} <= {True}
    first = {numbers.of(name) for name in known if name.stage == "b"}
    assert first == set(range(len(first))), "the frontend's come first"


STATES: tuple[dict[str, Any], ...] = (
    {"num_running_reqs": 1, "kv_cache_usage": 0.1},
    {"num_running_reqs": 1, "kv_cache_usage": 0.1},
    {"num_running_reqs": 1, "kv_cache_usage": 0.1, "prefix_cache_stats": PrefixCacheStats(requests=1, queries=9)},
    {"num_running_reqs": 1, "kv_cache_usage": 0.2},
    {"num_running_reqs": 1, "kv_cache_usage": 0.2, "num_waiting_reqs": 2},
    {"num_running_reqs": 1, "kv_cache_usage": 0.2, "num_skipped_waiting_reqs": 2},
    {"num_running_reqs": 1, "num_kv_fetch_reqs_by_stage": {"loading": 1}},
    {"num_running_reqs": 1},
    {"num_running_reqs": 1, "prefix_cache_stats": PrefixCacheStats(requests=1, queries=3)},
    {"num_running_reqs": 1},
    {},
)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Each call of vLLM's own logger."""
    made: list[Any] = []
    stock = PrometheusStatLogger.record
    monkeypatch.setattr(PrometheusStatLogger, "record", lambda *args: made.append(args) or stock(*args))
    return made


def test_a_step_is_recorded_as_vllm_records_it(config: VllmConfig, stats: ReplicaStats, calls: list[Any]) -> None:
    tokens = [number % 4 for number in range(len(STATES))]
    for state, count in zip(STATES, tokens, strict=True):
        stock = IterationStats()
        stock.num_generation_tokens = count
        outputs = EngineCoreOutputs(outputs=[EngineCoreOutput("a", [7] * count)])
        stats.record(SchedulerStats(**state), stock, engine_idx=0)
        stats.record(SchedulerStats(**state), tokens_of(outputs), engine_idx=1)
        assert written(CODES) == written(TEXT), state
    model = (("model_name", config.model_config.model),)
    assert written(CODES)[TOKENS, model] == sum(tokens)
    assert written(CODES)["vllm:iteration_tokens_total_count", model] == len(STATES)
    assert len(calls) == 2 * len(STATES) - 1, "a state that is shown already is not written again"


def test_a_replica_that_joins_again_in_the_same_state_is_shown(stats: ReplicaStats) -> None:
    for _ in range(2):
        step(stats, CODES, 1, running=2)
        assert one("vllm:num_requests_running", CODES) == 2
        stats.lost(CODES)
        assert one("vllm:num_requests_running", CODES) == 0


def test_gauges_that_other_api_servers_set_are_written_again(
    make_stats: Make, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stats = make_stats(client_count=2)
    logger: Any = next(each for each in stats._managers[1].stat_loggers if isinstance(each, PrometheusStatLogger))
    for pause, running, expected in ((0, 1, 1), (inf, 1, 7), (inf, 2, 2), (0, 2, 2), (inf, 0, 0), (inf, 0, 0)):
        monkeypatch.setattr(metrics_module, "AGAIN_S", pause)
        logger.gauge_scheduler_running[1].set(7)
        step(stats, CODES, 1, running)
        assert one("vllm:num_requests_running", CODES) == expected, (pause, running)
    assert len(calls) == 5
    assert one(TOKENS, CODES) == 6, "every token is counted in its step"
