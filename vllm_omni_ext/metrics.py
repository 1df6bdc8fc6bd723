"""Defines the metrics `vllm_omni_ext:*`: name, labels, unit and meaning. vLLM's own metrics `vllm:*` are separate.

Metrics of audio and images are defined with their modalities, and model plugins can add metrics. All are Prometheus
metrics of the process's default registry, always enabled, and have the label `model_name` in addition to their own.
"""

from __future__ import annotations

import glob
import os
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, multiprocess, values

PREFIX = "vllm_omni_ext:"
DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"
"""Environment variable of prometheus_client: the directory with the files in which processes share metric values."""

MODEL = "model_name"

LATENCY_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.35, 0.5, 0.75, 1, 1.5, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
GAP_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1, 1.5, 2, 3, 5, 10)


class StepGauge(Gauge):
    """A gauge of a replica's state that several API servers write; `/metrics` shows the state after the latest step.

    Each value is stored with the time of its step. The value that is written last can be of an earlier step, because an
    API server that replaces an ended one receives outputs that were sent to the ended one.
    """

    _at: ClassVar[float | None] = None

    def set(self, value: float) -> None:
        """Set the gauge, with the time `step_ns` inside `with state_after(step_ns)`, else with the present time."""
        if self._at is None or not self._is_most_recent:
            super().set(value)
        else:
            self._value.set(float(value), timestamp=self._at)

    @classmethod
    @contextmanager
    def state_after(cls, step_ns: int) -> Iterator[None]:
        """Set the time of all gauge values that are set inside the `with` block.

        Args:
            step_ns: Unix time in ns; 0: the time at which each value is set.
        """
        # A time in the future, from another host's clock, would suppress later values of this host.
        cls._at = min(step_ns / 1e9, time.time()) if step_ns else None
        try:
            yield
        finally:
            cls._at = None


AGAIN_S = 0.25
"""Seconds between two writes of an unchanged state of a busy replica."""


class ShownStates:
    """Decides whether a replica's state is written to gauges, from the state that this process wrote last.

    A changed state is always written. An unchanged state is written only if other processes set the same gauges. Each
    process receives the states after some of the steps only, so another process may have written an older state. The
    unchanged state of a busy replica is written at most every `AGAIN_S` seconds. That of an idle replica is always
    written, because no step may follow that would correct the gauges.

    Args:
        alone: no other process sets the gauges.
        clock: monotonic clock in seconds.
    """

    def __init__(self, *, alone: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._alone = alone
        self._clock = clock
        self._written: dict[Hashable, tuple[object, float]] = {}

    def due(self, replica: Hashable, state: object, *, busy: bool) -> bool:
        """Return whether a replica's state must be written now. If so, the state is recorded as written.

        Args:
            state: any value that is comparable.
            busy: whether the replica has running requests, so that another step follows.
        """
        known, since = self._written.get(replica, (None, 0.0))
        now = 0.0 if self._alone else self._clock()
        if known == state and (self._alone or (busy and now - since < AGAIN_S)):
            return False
        self._written[replica] = state, now
        return True

    def reset(self, replica: Hashable) -> None:
        """Make the next `due` of a replica return True, because the caller sets its gauges to another value."""
        self._written.pop(replica, None)


@dataclass(frozen=True, kw_only=True, eq=False)
class Metric:
    """Definition of a metric.

    Attributes:
        name: name without the prefix.
        labels: labels in addition to `model_name`.
        unit: unit of the metric's value.
        text: help text.
        mode: combination of a gauge's values from several API servers (prometheus_client's `multiprocess_mode`).
        buckets: upper bounds of a histogram, in the metric's unit.
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
        """Name with the prefix, as in the output of `/metrics`; the series of a histogram have suffixes."""
        return PREFIX + self.name

    def make(self, registry: CollectorRegistry) -> Any:
        """Create the prometheus_client object (Counter, StepGauge or Histogram) of the metric in a registry."""
        labels = (MODEL, *self.labels)
        match self.kind:
            case "counter":
                return Counter(self.full_name, self.text, labels, registry=registry)
            case "gauge":
                return StepGauge(self.full_name, self.text, labels, registry=registry, multiprocess_mode=self.mode)
            case "histogram":
                return Histogram(self.full_name, self.text, labels, registry=registry, buckets=self.buckets)


def counter(name: str, unit: str, text: str, labels: tuple[str, ...] = ()) -> Metric:
    """Return the definition of a counter."""
    return Metric(name=name, kind="counter", unit=unit, text=text, labels=labels)


def gauge(
    name: str, unit: str, text: str, labels: tuple[str, ...] = (), mode: Literal["mostrecent", "livesum"] = "mostrecent"
) -> Metric:
    """Return the definition of a gauge."""
    return Metric(name=name, kind="gauge", unit=unit, text=text, labels=labels, mode=mode)


def histogram(
    name: str, text: str, labels: tuple[str, ...] = (), buckets: Sequence[float] = LATENCY_S, unit: str = "seconds"
) -> Metric:
    """Return the definition of a histogram."""
    return Metric(name=name, kind="histogram", unit=unit, text=text, labels=labels, buckets=buckets)


STAGE, REPLICA, EDGE = ("stage",), ("stage", "replica"), ("source", "target")

TIME_TO_FIRST_TEXT = histogram(
    "time_to_first_text_seconds", "Time from a request's arrival to its first text token.", ("modalities",)
)
STAGE_QUEUE = histogram(
    "stage_queue_seconds", "Time a request waited in a stage's engine before it was first scheduled.", STAGE
)
STAGE_REQUEST_DURATION = histogram(
    "stage_request_duration_seconds",
    "Time from sending a request to a stage to that stage's last output for it.",
    STAGE,
)
STAGE_STEPS = counter(
    "stage_steps_total", "steps", "Steps of requests that a stage reported as done (e.g. of denoising).", STAGE
)
STAGE_PARTS = histogram(
    "stage_part_seconds",
    "Time that a stage spent on one output, by part of the work; the model names the parts.",
    ("stage", "part"),
)
REPLICA_RUNNING = gauge(
    "replica_requests_running", "requests", "Running requests of a replica, in its scheduler's last report.", REPLICA
)
REPLICA_WAITING = gauge(
    "replica_requests_waiting", "requests", "Waiting requests of a replica, in its scheduler's last report.", REPLICA
)
REPLICA_IN_FLIGHT = gauge(
    "replica_requests_in_flight",
    "requests",
    "Requests that API servers have open in a replica.",
    REPLICA,
    mode="livesum",
)
REPLICA_UP = gauge("replica_up", "0 or 1", "1 while a replica takes requests, 0 when it is gone.", REPLICA)
REPLICA_RESTARTS = counter("replica_restarts_total", "restarts", "How often a replica was started again.", REPLICA)
REPLICA_HEARTBEAT = gauge(
    "replica_heartbeat_timestamp_seconds",
    "seconds",
    "Unix time of a replica's last heartbeat; its age is time() minus this.",
    REPLICA,
)
COORDINATOR_VIEW = gauge(
    "coordinator_view_timestamp_seconds",
    "seconds",
    "Unix time of the coordinator's last view; its age is time() minus this.",
)
ROUTING_DECISIONS = counter(
    "routing_decisions_total",
    "requests",
    "Requests given to a replica; `reason` is affinity, policy or only (there was no other).",
    ("stage", "replica", "reason"),
)
REQUESTS_WAITING = gauge(
    "requests_waiting_for_replica",
    "requests",
    "Requests that wait for a stage none of whose replicas is up.",
    STAGE,
    mode="livesum",
)
REQUEST_FAILOVERS = counter(
    "request_failovers_total",
    "requests",
    "Requests that lost their replica of a stage and go on with another, now or when one is up.",
    STAGE,
)
REPLICA_INFO = gauge(
    "replica_info",
    "1",
    "Always 1; maps the label `engine` of the `vllm:` metrics to a replica.",
    ("engine", "stage", "replica"),
)
STAGE_TRANSFER_BYTES = counter(
    "stage_transfer_bytes_total",
    "bytes",
    "Payload handed from stage to stage; a token or codec id counts 4 bytes.",
    EDGE,
)
STAGE_TRANSFER_CHUNKS = counter("stage_transfer_chunks_total", "chunks", "Messages handed from stage to stage.", EDGE)
KV_WAIT = histogram(
    "kv_wait_seconds",
    "Time from the sending of a request with its KV cache's location to a decode stage to the first token.",
    EDGE,
)
KV_BYTES = counter(
    "kv_transfer_bytes_total", "bytes", "KV cache that a replica has sent (some connectors: has fetched).", REPLICA
)
KV_TRANSFER = histogram(
    "kv_transfer_seconds",
    "Time of a transfer of KV cache, as the connector measures it.",
    STAGE,
    buckets=(0.001, 0.0025, 0.005, *LATENCY_S),
)
KV_FAILURES = counter(
    "kv_transfer_failures_total",
    "transfers",
    "KV caches that were not sent, not received (the decode replica computes these prompts), or not fetched.",
    ("stage", "replica", "kind"),
)
KV_LOCAL_PREFILLS = counter(
    "kv_local_prefills_total",
    "requests",
    "Requests whose prompt a decode replica computes without a prefill replica: none is up, or not possible.",
    STAGE,
)
REQUESTS = counter(
    "requests_total",
    "requests",
    "Requests that have ended; `outcome` is finished, failed or aborted.",
    ("outcome", "modalities"),
)
ERRORS = counter(
    "errors_total",
    "errors",
    "Requests that ended with an error, by the kind of error and the stage it happened in.",
    ("kind", "stage"),
)
REALTIME_SESSIONS = Metric(
    name="realtime_sessions",
    kind="gauge",
    unit="sessions",
    text="Open sessions of `/v1/realtime`.",
    mode="livesum",
)
REALTIME_TURNS = Metric(
    name="realtime_turns_total",
    kind="counter",
    unit="turns",
    text="Turns of input sound that were committed in sessions.",
)
REALTIME_RESPONSES = Metric(
    name="realtime_responses_total",
    kind="counter",
    labels=("status",),
    unit="responses",
    text="Responses of sessions that have ended; `status` is completed, cancelled, incomplete or failed.",
)
REALTIME_INTERRUPTIONS = Metric(
    name="realtime_interruptions_total",
    kind="counter",
    unit="responses",
    text="Responses of sessions that the client's turn has cancelled.",
)
REALTIME_FIRST_SOUND = Metric(
    name="realtime_first_sound_seconds",
    kind="histogram",
    unit="seconds",
    text="Time from the beginning of a session's response, e.g. the detected end of a turn, to its first sound.",
    buckets=LATENCY_S,
)
REALTIME_AHEAD_TOKENS = Metric(
    name="realtime_ahead_tokens_total",
    kind="counter",
    unit="tokens",
    text="Prompt tokens of sessions that were computed before the turn's end, without those in the prefix cache.",
)

ALL = tuple(value for value in tuple(vars().values()) if isinstance(value, Metric))
"""All metrics above, in the order of the documentation."""

_IN_DEFAULT: dict[Metric, Any] = {}
"""The created metrics in the process's default registry, which `/metrics` exports."""


class Metrics:
    """Creates the metrics in a registry, and returns their time series with the label `model_name` of one model.

    Args:
        model: value of the label `model_name`.
        registry: None: the process's default registry.
    """

    def __init__(self, model: str, registry: CollectorRegistry | None = None) -> None:
        self._model = model
        self._registry = REGISTRY if registry is None else registry
        self._made = _IN_DEFAULT if registry is None else {}
        for metric in ALL:
            self._make(metric)
        self._series: dict[tuple[Metric, tuple[str, ...]], Any] = {}
        self.shared = DIRECTORY in os.environ
        """Whether several processes share metric values in files."""

    def _make(self, metric: Metric) -> Any:
        if metric not in self._made:
            self._made[metric] = metric.make(self._registry)
        return self._made[metric]

    def of(self, metric: Metric, *labels: str) -> Any:
        """Return the time series of a metric with these values of `Metric.labels`, in order; create it if necessary."""
        series = self._series.get((metric, labels))
        if series is None:
            series = self._series[metric, labels] = self._make(metric).labels(self._model, *labels)
        return series

    def remove(self, metric: Metric, *labels: str) -> bool:
        """Remove a time series; return False, without removal, if processes share metric values in files."""
        if self.shared:
            return False
        self._series.pop((metric, labels), None)
        self._made[metric].remove(self._model, *labels)
        return True

    def shared_counts(self, counter: Metric) -> dict[tuple[str, ...], float]:
        """Return a counter's sums over all processes, also ended ones, by the values of its labels.

        The result is empty if processes do not share metric values in files.
        """
        if not self.shared:
            return {}
        files = glob.glob(os.path.join(glob.escape(os.environ[DIRECTORY]), "counter_*.db"))
        return {
            tuple(sample.labels[label] for label in counter.labels): sample.value
            for family in multiprocess.MultiProcessCollector.merge(files)
            for sample in family.samples
            if sample.name == counter.full_name and sample.labels[MODEL] == self._model
        }


def share(directory: str) -> None:
    """Make this process and its child processes share metric values in files of a directory.

    Must be called before metrics are created. prometheus_client reads the environment variable `DIRECTORY` when it is
    imported, and vLLM may have imported it already, so this function also sets the class of its values.
    """
    os.environ[DIRECTORY] = directory
    values.ValueClass = values.get_value_class()


def mark_dead(pid: int) -> None:
    """Remove the `livesum` gauges of an ended process from the shared files. Its other values stay."""
    if DIRECTORY in os.environ:
        multiprocess.mark_process_dead(pid)
