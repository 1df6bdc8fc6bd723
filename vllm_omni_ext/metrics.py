"""Every metric of this package as data: name, labels, unit and meaning. vLLM's own `vllm:` metrics come on top.

They are Prometheus metrics of the process's default registry, always on. Each also has the label `model_name`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, multiprocess, values

PREFIX = "vllm_omni_ext:"
DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"
"""Environment variable of prometheus_client: where several processes put their values together."""

MODEL = "model_name"

_LATENCY_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.35, 0.5, 0.75, 1, 1.5, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_GAP_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1, 1.5, 2, 3, 5, 10)
_FACTOR = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.2, 1.5, 2, 3, 5, 10, 25)


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric.

    Attributes:
        name: without the prefix.
        labels: besides `model_name`.
        unit: of its value.
        mode: how a gauge's values of several API servers become one (prometheus_client's `multiprocess_mode`).
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
        """As it is scraped (a histogram's series have suffixes)."""
        return PREFIX + self.name

    def make(self, registry: CollectorRegistry) -> Any:
        """Create it in a registry."""
        labels = (MODEL, *self.labels)
        match self.kind:
            case "counter":
                return Counter(self.full_name, self.text, labels, registry=registry)
            case "gauge":
                return Gauge(self.full_name, self.text, labels, registry=registry, multiprocess_mode=self.mode)
            case "histogram":
                return Histogram(self.full_name, self.text, labels, registry=registry, buckets=self.buckets)


TIME_TO_FIRST_TEXT = Metric(
    name="time_to_first_text_seconds",
    kind="histogram",
    labels=("modalities",),
    unit="seconds",
    text="Time from a request's arrival to its first text token.",
    buckets=_LATENCY_S,
)
TIME_TO_FIRST_AUDIO = Metric(
    name="time_to_first_audio_seconds",
    kind="histogram",
    unit="seconds",
    text="Time from a request's arrival to its first piece of sound.",
    buckets=_LATENCY_S,
)
AUDIO_CHUNK_GAP = Metric(
    name="audio_chunk_gap_seconds",
    kind="histogram",
    unit="seconds",
    text="Time between two pieces of sound of a request.",
    buckets=_GAP_S,
)
AUDIO_SECONDS = Metric(
    name="audio_seconds_total", kind="counter", unit="seconds", text="Sound made, counted in seconds of playing time."
)
AUDIO_UNDERRUN = Metric(
    name="audio_underrun_seconds_total",
    kind="counter",
    unit="seconds",
    text="Time for which somebody who plays sound as it comes had none left while more was to come.",
)
REAL_TIME_FACTOR = Metric(
    name="real_time_factor",
    kind="histogram",
    unit="ratio",
    text="Time from arrival to the last piece of sound, divided by the sound's playing time; below 1 keeps up.",
    buckets=_FACTOR,
)
STAGE_QUEUE = Metric(
    name="stage_queue_seconds",
    kind="histogram",
    labels=("stage",),
    unit="seconds",
    text="Time a request waited in a stage's engine before it was first scheduled.",
    buckets=_LATENCY_S,
)
STAGE_TIME = Metric(
    name="stage_seconds",
    kind="histogram",
    labels=("stage",),
    unit="seconds",
    text="Time from sending a request to a stage to that stage's last output for it.",
    buckets=_LATENCY_S,
)
REPLICA_RUNNING = Metric(
    name="replica_requests_running",
    kind="gauge",
    labels=("stage", "replica"),
    unit="requests",
    text="Requests a replica works on, as its scheduler last said.",
)
REPLICA_WAITING = Metric(
    name="replica_requests_waiting",
    kind="gauge",
    labels=("stage", "replica"),
    unit="requests",
    text="Requests that wait in a replica's queue, as its scheduler last said.",
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
    name="replica_restarts",
    kind="gauge",
    labels=("stage", "replica"),
    unit="restarts",
    text="How often a replica was started again.",
)
REPLICA_HEARTBEAT = Metric(
    name="replica_heartbeat_timestamp_seconds",
    kind="gauge",
    labels=("stage", "replica"),
    unit="seconds",
    text="Unix time at which a replica was last heard of; its age is time() minus this.",
)
COORDINATOR_VIEW = Metric(
    name="coordinator_view_timestamp_seconds",
    kind="gauge",
    unit="seconds",
    text="Unix time at which the coordinator was last heard of; the age of what it said is time() minus this.",
)
BALANCING = Metric(
    name="balancing_decisions_total",
    kind="counter",
    labels=("stage", "replica", "why"),
    unit="requests",
    text="Requests given to a replica; `why` is affinity, policy or only (there was no other).",
)
REQUESTS_WAITING = Metric(
    name="requests_waiting_for_replica",
    kind="gauge",
    labels=("stage",),
    unit="requests",
    text="Requests that wait for a stage none of whose replicas is up.",
    mode="livesum",
)
TAKEN_OVER = Metric(
    name="requests_taken_over_total",
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
    text="Always 1; says which replica the label `engine` of the `vllm:` metrics means.",
)
HANDOVER_BYTES = Metric(
    name="handover_bytes_total",
    kind="counter",
    labels=("source", "target"),
    unit="bytes",
    text="Payload handed from stage to stage; a token or codec id counts 4 bytes.",
)
HANDOVER_CHUNKS = Metric(
    name="handover_chunks_total",
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
    text="Time from telling a decode stage where a prompt's KV cache is to its first token: waiting, transfer, a step.",
    buckets=_LATENCY_S,
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
    buckets=(0.001, 0.0025, 0.005, *_LATENCY_S),
)
KV_FAILURES = Metric(
    name="kv_transfer_failures_total",
    kind="counter",
    labels=("stage", "replica", "kind"),
    unit="transfers",
    text="KV caches that were not sent, not received (the decode replica computes these prompts), or never asked for.",
)
KV_ALONE = Metric(
    name="kv_not_handed_over_total",
    kind="counter",
    labels=("stage",),
    unit="requests",
    text="Requests whose prompt the decode stage was told to compute itself: no prefill replica, or not possible.",
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

ALL = (
    TIME_TO_FIRST_TEXT,
    TIME_TO_FIRST_AUDIO,
    AUDIO_CHUNK_GAP,
    AUDIO_SECONDS,
    AUDIO_UNDERRUN,
    REAL_TIME_FACTOR,
    STAGE_QUEUE,
    STAGE_TIME,
    REPLICA_RUNNING,
    REPLICA_WAITING,
    REPLICA_IN_FLIGHT,
    REPLICA_UP,
    REPLICA_RESTARTS,
    REPLICA_HEARTBEAT,
    COORDINATOR_VIEW,
    BALANCING,
    REQUESTS_WAITING,
    TAKEN_OVER,
    REPLICA_INFO,
    HANDOVER_BYTES,
    HANDOVER_CHUNKS,
    KV_WAIT,
    KV_BYTES,
    KV_TRANSFER,
    KV_FAILURES,
    KV_ALONE,
    REQUESTS,
    ERRORS,
)


class Metrics:
    """The metrics of a registry, ready to be written for one model.

    Args:
        model: value of `model_name`, as in vLLM's own metrics.
        registry: None takes the process's default one, in which each metric is made once.
    """

    def __init__(self, model: str, registry: CollectorRegistry | None = None) -> None:
        self._model = model
        self._made = in_default_registry() if registry is None else make_all(registry)

    def of(self, metric: Metric, *labels: str) -> Any:
        """The series of a metric with these labels; hold on to it where it is written often."""
        return self._made[metric].labels(self._model, *labels)

    def remove(self, metric: Metric, *labels: str) -> None:
        """Show the series no more, if it is there. Where several processes share their values, it stays as it is."""
        if DIRECTORY not in os.environ:
            self._made[metric].remove(self._model, *labels)


def make_all(registry: CollectorRegistry) -> dict[Metric, Any]:
    """Create every metric in a registry."""
    return {metric: metric.make(registry) for metric in ALL}


@cache
def in_default_registry() -> dict[Metric, Any]:
    """Every metric, in the registry that `/metrics` shows."""
    return make_all(REGISTRY)


def share(directory: str) -> None:
    """Let this process and those it forks put their metrics together in a directory; before any is made.

    prometheus_client decides how values are kept when it is imported, which vLLM may have done already.
    """
    os.environ[DIRECTORY] = directory
    values.ValueClass = values.get_value_class()


def mark_dead(pid: int) -> None:
    """What a process counted stays; what it had at the moment (gauges of living processes) is gone."""
    if DIRECTORY in os.environ:
        multiprocess.mark_process_dead(pid)
