"""vLLM's metrics with two more labels, `stage` and `replica`, made once for any number of vLLM's loggers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from prometheus_client import REGISTRY, Counter, Histogram
from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import (
    ECConnectorProm,
    KVConnectorProm,
    PerfMetricsProm,
    PrometheusStatLogger,
    SpecDecodingProm,
)

from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.metrics import StepGauge

ENGINE = "engine"


class EngineMetric:
    """One of vLLM's metrics that has the label `engine`. Its series also get `stage` and `replica`.

    Args:
        labels: vLLM's labels of it. If one is named `stage` itself, it stays, and only `replica` is added.
        replica_of: the replica of an engine's number.
    """

    def __init__(
        self, kind: Callable[..., Any], labels: tuple[str, ...], replica_of: Callable[[int], ReplicaId], **options: Any
    ) -> None:
        self._labels = labels
        self._replica_of = replica_of
        self._added = tuple(each for each in ("stage", "replica") if each not in labels)
        self._metric = kind(labelnames=(*labels, *self._added), **options)
        self._series: dict[tuple[Any, ...], Any] = {}

    def labels(self, *values: Any, **named: Any) -> Any:
        """Return a series, as prometheus_client's metrics do."""
        key = values, *named.items()
        series = self._series.get(key)
        if series is None:
            series = self._series[key] = self._make(values, named)
        return series

    def _make(self, values: tuple[Any, ...], named: dict[str, Any]) -> Any:
        given = dict(zip(self._labels, values, strict=False)) | named
        replica = self._replica_of(int(given[ENGINE]))
        added = {"stage": replica.stage, "replica": str(replica)}
        return self._metric.labels(**given, **{name: added[name] for name in self._added})


class EngineSeries:
    """Makes each metric of vLLM's loggers once; all loggers get the same one."""

    def __init__(self, replica_of: Callable[[int], ReplicaId]) -> None:
        self._replica_of = replica_of
        self._made: dict[str, Any] = {}

    def make(
        self, kind: Callable[..., Any], name: str, documentation: str = "", labelnames: Iterable[str] = (), **more: Any
    ) -> Any:
        """Return the metric of that name, with the arguments of prometheus_client's classes."""
        if name not in self._made:
            labels, options = tuple(labelnames), {"name": name, "documentation": documentation, **more}
            if ENGINE in labels:
                self._made[name] = EngineMetric(kind, labels, self._replica_of, **options)
            else:
                self._made[name] = kind(labelnames=labels, **options)
        return self._made[name]

    def logger_class(self) -> type[PrometheusStatLogger]:
        """Return vLLM's logger with all its metrics made here, as vLLM's own variant for Ray replaces them."""
        kinds = {
            name: staticmethod(partial(self.make, kind))
            for name, kind in (("_gauge_cls", StepGauge), ("_counter_cls", Counter), ("_histogram_cls", Histogram))
        }
        count = {"_counter_cls": kinds["_counter_cls"]}
        parts = {
            "_spec_decoding_cls": type("SpecDecoding", (SpecDecodingProm,), count),
            "_perf_metrics_cls": type("PerfMetrics", (PerfMetricsProm,), count),
            "_kv_connector_cls": type("KVConnector", (KVConnectorProm,), kinds),
            "_ec_connector_cls": type("ECConnector", (ECConnectorProm,), kinds),
        }
        return type("EngineLogger", (PrometheusStatLogger,), kinds | parts)


class NoSeries(PrometheusStatLogger):
    """Replaces the logger that `AsyncLLM` makes before the replicas are known: its series would stay next to ours."""

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int] | None = None) -> None:
        pass

    def log_engine_initialized(self) -> None:
        """Does nothing."""


@contextmanager
def registered() -> Iterator[None]:
    """Keep metrics registered: each of vLLM's loggers begins by unregistering all `vllm:` metrics of the process."""
    before = list(REGISTRY._collector_to_names)
    yield
    for collector in before:
        if collector not in REGISTRY._collector_to_names:
            REGISTRY.register(collector)
