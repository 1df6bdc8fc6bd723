"""The metrics of this package as data: name, labels, unit and meaning. vLLM's own `vllm:` metrics are separate.

Metrics of audio and images are defined with their modalities; a model plugin may add more. All are Prometheus metrics
of the process's default registry, always on, and also have the label `model_name`.
"""

from __future__ import annotations

import glob
import os
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Literal

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, multiprocess, values

PREFIX = "vllm_omni_ext:"
DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"
"""Environment variable of prometheus_client: the directory in which several processes share their values."""

MODEL = "model_name"

LATENCY_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.35, 0.5, 0.75, 1, 1.5, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
GAP_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1, 1.5, 2, 3, 5, 10)


class StepGauge(Gauge):
    """A gauge of a replica's state, which several API servers write: the state after the latest step is shown.

    The state written last may be older: an API server receives outputs that were sent to the one it replaces.
    """

    _at: ClassVar[float | None] = None

    def set(self, value: float) -> None:
        """Set the gauge."""
        if self._at is None or not self._is_most_recent:
            super().set(value)
        else:
            self._value.set(float(value), timestamp=self._at)

    @classmethod
    @contextmanager
    def state_after(cls, step_ns: int) -> Iterator[None]:
        """Set the time of the values that are set inside the block.

        Args:
            step_ns: Unix time of the step, in nanoseconds; 0: not known, so values are of now.
        """
        # The clock of another host may be ahead; values that this host writes later must still count.
        cls._at = min(step_ns / 1e9, time.time()) if step_ns else None
        try:
            yield
        finally:
            cls._at = None


AGAIN_S = 0.25
"""How long a busy replica's state is not written again, in seconds."""


class ShownStates:
    """The last state of each replica that this process has written to gauges.

    An unchanged state is written again only if other processes set the same gauges: each receives the states after some
    of the steps. An idle replica's state is written at once, because no later step might correct another process's
    value. A busy replica's state is written at most every `AGAIN_S`.

    Args:
        alone: no other process sets the gauges.
        clock: monotonic clock, seconds.
    """

    def __init__(self, *, alone: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._alone = alone
        self._clock = clock
        self._written: dict[Hashable, tuple[object, float]] = {}

    def due(self, replica: Hashable, state: object, *, busy: bool) -> bool:
        """Return whether a replica's state is to be written now; if so, record it as written."""
        known, since = self._written.get(replica, (None, 0.0))
        now = 0.0 if self._alone else self._clock()
        if known == state and (self._alone or (busy and now - since < AGAIN_S)):
            return False
        self._written[replica] = state, now
        return True

    def reset(self, replica: Hashable) -> None:
        """The gauges of a replica were, or will be, set to something else."""
        self._written.pop(replica, None)


@dataclass(frozen=True, kw_only=True, eq=False)
class Metric:
    """One metric.

    Attributes:
        name: name without the prefix.
        labels: labels besides `model_name`.
        unit: unit of its value.
        mode: how a gauge's values of several API servers are combined (prometheus_client's `multiprocess_mode`).
        buckets: upper bounds of a histogram, in its unit.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...] = ()
    unit: str
    text: str
    mode: Literal["mostrecent", "livesum"] = "mostrecent"
    buckets: Sequence[float] = ()

    @property
    def full_name(self) -> str:
        """Name in the scraped output (a histogram's series have suffixes)."""
        return PREFIX + self.name

    def make(self, registry: CollectorRegistry) -> Any:
        """Create the metric in a registry."""
        labels = (MODEL, *self.labels)
        match self.kind:
            case "counter":
                return Counter(self.full_name, self.text, labels, registry=registry)
            case "gauge":
                return StepGauge(self.full_name, self.text, labels, registry=registry, multiprocess_mode=self.mode)
            case "histogram":
                return Histogram(self.full_name, self.text, labels, registry=registry, buckets=self.buckets)


TIME_TO_FIRST_TEXT = Metric(
    name="time_to_first_text_seconds",
    kind="histogram",
    labels=("modalities",),
    unit="seconds",
    text="Time from a request's arrival to its first text token.",
    buckets=LATENCY_S,
)
STAGE_QUEUE = Metric(
    name="stage_queue_seconds",
    kind="histogram",
    labels=("stage",),
    unit="seconds",
    text="Time a request waited in a stage's engine before it was first scheduled.",
    buckets=LATENCY_S,
)
STAGE_REQUEST_DURATION = Metric(
    name="stage_request_duration_seconds",
    kind="histogram",
    labels=("stage",),
    unit="seconds",
    text="Time from sending a request to a stage to that stage's last output for it.",
    buckets=LATENCY_S,
)
STAGE_STEPS = Metric(
    name="stage_steps_total",
    kind="counter",
    labels=("stage",),
    unit="steps",
    text="Steps of requests that a stage reported as done (e.g. of denoising).",
)
STAGE_PARTS = Metric(
    name="stage_part_seconds",
    kind="histogram",
    labels=("stage", "part"),
    unit="seconds",
    text="Time that a stage spent on one output, by part of the work; the model names the parts.",
    buckets=LATENCY_S,
)
REPLICA_RUNNING = Metric(
    name="replica_requests_running",
    kind="gauge",
    labels=("stage", "replica"),
    unit="requests",
    text="Running requests of a replica, in its scheduler's last report.",
)
REPLICA_WAITING = Metric(
    name="replica_requests_waiting",
    kind="gauge",
    labels=("stage", "replica"),
    unit="requests",
    text="Waiting requests of a replica, in its scheduler's last report.",
)
REPLICA_IN_FLIGHT = Metric(
    name="replica_requests_in_flight",
    kind="gauge",
    labels=("stage", "replica"),
    unit="requests",
    text="Requests that API servers have open in a replica.",
    mode="livesum",
)
REPLICA_UP = Metric(
    name="replica_up",
    kind="gauge",
    labels=("stage", "replica"),
    unit="0 or 1",
    text="1 while a replica takes requests, 0 when it is gone.",
)
REPLICA_RESTARTS = Metric(
    name="replica_restarts_total",
    kind="counter",
    labels=("stage", "replica"),
    unit="restarts",
    text="How often a replica was started again.",
)
REPLICA_HEARTBEAT = Metric(
    name="replica_heartbeat_timestamp_seconds",
    kind="gauge",
    labels=("stage", "replica"),
    unit="seconds",
    text="Unix time of a replica's last heartbeat; its age is time() minus this.",
)
COORDINATOR_VIEW = Metric(
    name="coordinator_view_timestamp_seconds",
    kind="gauge",
    unit="seconds",
    text="Unix time of the coordinator's last view; its age is time() minus this.",
)
ROUTING_DECISIONS = Metric(
    name="routing_decisions_total",
    kind="counter",
    labels=("stage", "replica", "reason"),
    unit="requests",
    text="Requests given to a replica; `reason` is affinity, policy or only (there was no other).",
)
REQUESTS_WAITING = Metric(
    name="requests_waiting_for_replica",
    kind="gauge",
    labels=("stage",),
    unit="requests",
    text="Requests that wait for a stage none of whose replicas is up.",
    mode="livesum",
)
REQUEST_FAILOVERS = Metric(
    name="request_failovers_total",
    kind="counter",
    labels=("stage",),
    unit="requests",
    text="Requests that lost their replica of a stage and go on with another, now or when one is up.",
)
REPLICA_INFO = Metric(
    name="replica_info",
    kind="gauge",
    labels=("engine", "stage", "replica"),
    unit="1",
    text="Always 1; maps the label `engine` of the `vllm:` metrics to a replica.",
)
STAGE_TRANSFER_BYTES = Metric(
    name="stage_transfer_bytes_total",
    kind="counter",
    labels=("source", "target"),
    unit="bytes",
    text="Payload handed from stage to stage; a token or codec id counts 4 bytes.",
)
STAGE_TRANSFER_CHUNKS = Metric(
    name="stage_transfer_chunks_total",
    kind="counter",
    labels=("source", "target"),
    unit="chunks",
    text="Messages handed from stage to stage.",
)
KV_WAIT = Metric(
    name="kv_wait_seconds",
    kind="histogram",
    labels=("source", "target"),
    unit="seconds",
    text="Time from the sending of a request with its KV cache's location to a decode stage to the first token.",
    buckets=LATENCY_S,
)
KV_BYTES = Metric(
    name="kv_transfer_bytes_total",
    kind="counter",
    labels=("stage", "replica"),
    unit="bytes",
    text="KV cache that a replica has sent (some connectors: has fetched).",
)
KV_TRANSFER = Metric(
    name="kv_transfer_seconds",
    kind="histogram",
    labels=("stage",),
    unit="seconds",
    text="Time of a transfer of KV cache, as the connector measures it.",
    buckets=(0.001, 0.0025, 0.005, *LATENCY_S),
)
KV_FAILURES = Metric(
    name="kv_transfer_failures_total",
    kind="counter",
    labels=("stage", "replica", "kind"),
    unit="transfers",
    text="KV caches that were not sent, not received (the decode replica computes these prompts), or not fetched.",
)
KV_LOCAL_PREFILLS = Metric(
    name="kv_local_prefills_total",
    kind="counter",
    labels=("stage",),
    unit="requests",
    text="Requests whose prompt a decode replica computes without a prefill replica: none is up, or not possible.",
)
REQUESTS = Metric(
    name="requests_total",
    kind="counter",
    labels=("outcome", "modalities"),
    unit="requests",
    text="Requests that have ended; `outcome` is finished, failed or aborted.",
)
ERRORS = Metric(
    name="errors_total",
    kind="counter",
    labels=("kind", "stage"),
    unit="errors",
    text="Requests that ended with an error, by the kind of error and the stage it happened in.",
)

ALL = tuple(value for value in tuple(vars().values()) if isinstance(value, Metric))
"""All metrics above, in the order of the documentation."""


class Metrics:
    """The metrics of a registry, for writing with the labels of one model.

    Args:
        model: value of `model_name`, as in vLLM's own metrics.
        registry: None: the process's default one, in which each metric is made once.
    """

    def __init__(self, model: str, registry: CollectorRegistry | None = None) -> None:
        self._model = model
        self._made = in_default_registry() if registry is None else make_all(registry)
        self._series: dict[tuple[Metric, tuple[str, ...]], Any] = {}
        self.shared = DIRECTORY in os.environ
        """Whether several processes share their values."""

    def of(self, metric: Metric, *labels: str) -> Any:
        """Return the series of a metric with these labels."""
        series = self._series.get((metric, labels))
        if series is None:
            series = self._series[metric, labels] = self._made[metric].labels(self._model, *labels)
        return series

    def remove(self, metric: Metric, *labels: str) -> bool:
        """Remove the series, if it exists. Returns False, and keeps it, if several processes share their values."""
        if self.shared:
            return False
        self._series.pop((metric, labels), None)
        self._made[metric].remove(self._model, *labels)
        return True

    def shared_counts(self, counter: Metric) -> dict[tuple[str, ...], float]:
        """Return a counter's totals over all processes, also ended ones, by its labels; empty if nothing is shared."""
        if not self.shared:
            return {}
        files = glob.glob(os.path.join(glob.escape(os.environ[DIRECTORY]), "counter_*.db"))
        return {
            tuple(sample.labels[label] for label in counter.labels): sample.value
            for family in multiprocess.MultiProcessCollector.merge(files)
            for sample in family.samples
            if sample.name == counter.full_name and sample.labels[MODEL] == self._model
        }


class Registered(dict[Metric, Any]):
    """The metrics of a registry, each made on first access."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__()
        self._registry = registry

    def __missing__(self, metric: Metric) -> Any:
        made = self[metric] = metric.make(self._registry)
        return made


def make_all(registry: CollectorRegistry, metrics: Iterable[Metric] = ALL) -> Registered:
    """Create metrics in a registry."""
    made = Registered(registry)
    for metric in metrics:
        made[metric]
    return made


@cache
def in_default_registry() -> Registered:
    """Return the metrics in the registry that `/metrics` shows."""
    return make_all(REGISTRY)


def share(directory: str) -> None:
    """Make this process and its forks share their metrics in a directory; called before any metric is made.

    prometheus_client chooses how to keep values when it is imported, which vLLM may have done already.
    """
    os.environ[DIRECTORY] = directory
    values.ValueClass = values.get_value_class()


def mark_dead(pid: int) -> None:
    """Remove a dead process's gauges of living processes; its counters stay."""
    if DIRECTORY in os.environ:
        multiprocess.mark_process_dead(pid)
