"""Records events of requests and replicas as Prometheus metrics, OpenTelemetry spans, and `metrics` of responses."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry
from vllm.tracing import SpanAttributes, SpanKind, extract_trace_context, instrument_manual
from vllm.v1.metrics.stats import SchedulerStats

from vllm_omni_ext import metrics as m
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.metrics import Metrics, ShownStates
from vllm_omni_ext.modalities.base import Modality, OutputChunk, ProgressChunk
from vllm_omni_ext.modalities.registry import CORE
from vllm_omni_ext.observability.request_trace import HandOver, Outcome, OutputTrace, RequestTrace, StageTiming
from vllm_omni_ext.orchestrator.messages import Opened, Output
from vllm_omni_ext.orchestrator.state import RequestObserver
from vllm_omni_ext.pool.stage_pool import Why

GONE_WITH_REPLICA = (
    m.REPLICA_UP,
    m.REPLICA_RUNNING,
    m.REPLICA_WAITING,
    m.REPLICA_IN_FLIGHT,
    m.REPLICA_HEARTBEAT,
)
"""Metrics whose time series are removed together with a replica.

Counters are not removed, because sums over replicas must not decrease.
"""

ID_BYTES = 4
"""Bytes that are counted for one token id or codec id in a transfer between stages."""

KV_FAILURE_COLUMNS = {"send": "num_failed_transfers", "receive": "num_failed_recvs", "expired": "num_kv_expired_reqs"}
"""Kind of failure in the metric `KV_FAILURES` -> key in the statistics of vLLM's KV connectors."""

NS = 1_000_000_000


class Observer(RequestObserver):
    """Records the events of one API server. Its public methods without docstrings are those of `RequestObserver`.

    Args:
        metrics: the metrics to write.
        frontend: name of the stage whose tokens are vLLM's text output.
        replicas: the replicas that are up at the start.
        modalities: modalities by name, whose `observe` records the chunks of answers.
        alone: this is the only API server, so no other process sets the same gauges.
        spans: emit OpenTelemetry spans.
        clock: monotonic clock in seconds.
    """

    def __init__(
        self,
        metrics: Metrics,
        *,
        frontend: str,
        replicas: Iterable[ReplicaId],
        modalities: Mapping[str, Modality] = CORE,
        alone: bool = True,
        spans: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics = metrics
        self._frontend = frontend
        self._modalities = modalities
        self._shown = ShownStates(alone=alone, clock=clock)
        self._spans = spans
        self._clock = clock
        self.loads: dict[ReplicaId, tuple[int, int]] = {}
        """(running requests, waiting requests) by replica."""
        self._restarts: dict[ReplicaId, int] = {}
        for replica in replicas:
            self.replica_up(replica)
            self.waiting(replica.stage, 0)  # creates the time series before a request waits

    @classmethod
    def unseen(cls, frontend: str, replicas: Iterable[ReplicaId]) -> Observer:
        """Return an observer whose metrics are in a registry of its own, which `/metrics` does not export."""
        return cls(Metrics("", CollectorRegistry()), frontend=frontend, replicas=replicas)

    @property
    def metrics(self) -> Metrics:
        """The metrics that this observer writes; other classes of the API server add metrics to them."""
        return self._metrics

    # -- replicas -----------------------------------------------------------------------------------------------

    def _of(self, metric: m.Metric, replica: ReplicaId, *more: str) -> Any:
        return self._metrics.of(metric, replica.stage, str(replica), *more)

    def replica_up(self, replica: ReplicaId) -> None:
        """Record that a replica is up and can receive requests."""
        self._of(m.REPLICA_UP, replica).set(1)
        self._of(m.REPLICA_IN_FLIGHT, replica)
        self.loaded(replica, SchedulerStats())

    def replica_down(self, replica: ReplicaId) -> None:
        """Record that a replica is down, and set its numbers of requests to 0."""
        self._of(m.REPLICA_UP, replica).set(0)
        self.loaded(replica, SchedulerStats())
        self.bound(replica, 0)

    def continue_restarts(self) -> None:
        """Read the restart counts of replicas from the shared metric files.

        Called in an API server that replaces an ended one. The ended one has written the counts.
        """
        counts = self._metrics.shared_counts(m.REPLICA_RESTARTS)
        self._restarts = {ReplicaId.parse(replica): int(count) for (_, replica), count in counts.items()}

    def restarted(self, replica: ReplicaId, total: int) -> None:
        """Increase a replica's restart counter to `total`.

        Only one API server may call this, because `/metrics` sums the counters of all API servers.
        """
        counted = self._restarts.get(replica, 0)
        self._restarts[replica] = max(counted, total)
        self._of(m.REPLICA_RESTARTS, replica).inc(self._restarts[replica] - counted)

    def heartbeat(self, replica: ReplicaId) -> None:
        """Set the time of a replica's last heartbeat to now."""
        self._of(m.REPLICA_HEARTBEAT, replica).set(time.time())

    def viewed(self, age_s: float) -> None:
        """Record the age, in seconds, of the coordinator's latest view, a message with the states of all replicas."""
        self._metrics.of(m.COORDINATOR_VIEW).set(time.time() - age_s)

    def name_engine(self, number: int, replica: ReplicaId) -> None:
        """Write `REPLICA_INFO`, which maps the value `number` of the label `engine` to a replica."""
        self._metrics.of(m.REPLICA_INFO, str(number), replica.stage, str(replica)).set(1)

    def decided(self, replica: ReplicaId, why: Why) -> None:
        """Count a request that was bound to a replica, by the reason of the choice (see `pool.stage_pool.Why`)."""
        self._of(m.ROUTING_DECISIONS, replica, why).inc()

    def forgotten(self, replica: ReplicaId) -> None:
        """Remove the time series of a replica that has left the deployment.

        If processes share metric files, nothing can be removed: the values are then 0, and NaN for the heartbeat.
        """
        if replica in self.loads:
            self.replica_down(replica)
        self._of(m.REPLICA_HEARTBEAT, replica).set(math.nan)
        for metric in GONE_WITH_REPLICA:
            self._metrics.remove(metric, replica.stage, str(replica))
        self._shown.reset(replica)
        self.loads.pop(replica, None)

    def loaded(self, replica: ReplicaId, stats: SchedulerStats) -> None:
        """Record a replica's scheduler statistics after a step.

        `stats.step_counter` is the time of the step in Unix ns; `engine.agent.with_agent` sets it in the replica.
        """
        load = stats.num_running_reqs, stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
        self.loads[replica] = load
        if self._shown.due(replica, load, busy=load[0] > 0):
            with m.StepGauge.state_after(stats.step_counter):
                self._of(m.REPLICA_RUNNING, replica).set(load[0])
                self._of(m.REPLICA_WAITING, replica).set(load[1])
        if stats.kv_connector_stats:
            self._transferred(replica, stats.kv_connector_stats)

    def _transferred(self, replica: ReplicaId, columns: Mapping[str, Any]) -> None:
        """Record the transfers and failures of a replica's KV connector since its last report.

        Args:
            columns: vLLM's statistics of the connector by name; each value is a list with one entry per event.
        """
        self._of(m.KV_BYTES, replica).inc(sum(columns.get("bytes_transferred", ())))
        for seconds in columns.get("transfer_duration", ()):
            self._metrics.of(m.KV_TRANSFER, replica.stage).observe(seconds)
        for kind, column in KV_FAILURE_COLUMNS.items():
            if failures := len(columns.get(column, ())):
                self._of(m.KV_FAILURES, replica, kind).inc(failures)

    def bound(self, replica: ReplicaId, requests: int) -> None:
        """Record the number of requests of this API server that are open in a replica."""
        self._of(m.REPLICA_IN_FLIGHT, replica).set(requests)

    # -- requests -----------------------------------------------------------------------------------------------

    def opened(self, event: Opened) -> RequestTrace:
        record = RequestTrace(
            request_id=event.external_id,
            modalities=event.options.modalities,
            started=self._clock() - max(0.0, time.time() - event.arrival),
            arrival=event.arrival,
            trace_headers=event.trace_headers,
            streamed=event.options.streamed,
        )
        if event.watch is not None:
            event.watch(record)
        return record

    def sent(self, trace: RequestTrace | None, source: str | None, replica: ReplicaId, payload: Any = None) -> None:
        if trace is None:
            return
        now, target = self._clock() - trace.started, replica.stage
        if target not in trace.stages:
            trace.stages[target] = StageTiming(replica, sent=now)
        if source is None:
            return
        edge, size = (source, target), payload_bytes(payload)
        over = trace.handovers.get(edge)
        if over is None:
            over = trace.handovers[edge] = HandOver(first=now)
        over.last, over.chunks, over.size = now, over.chunks + 1, over.size + size
        self._metrics.of(m.STAGE_TRANSFER_CHUNKS, source, target).inc()
        self._metrics.of(m.STAGE_TRANSFER_BYTES, source, target).inc(size)

    def produced(self, trace: RequestTrace | None, output: Output) -> None:
        stage = output.replica.stage
        timing = None if trace is None else trace.stages.get(stage)
        if trace is None or timing is None:
            return
        timing.last = self._clock() - trace.started
        timing.tokens += len(output.tokens)
        if output.waited_s is not None and timing.waited is None:
            timing.waited = output.waited_s
            self._metrics.of(m.STAGE_QUEUE, stage).observe(timing.waited)
        if timing.cached is None:
            timing.cached = output.cached
        if timing.first is None:
            timing.first = timing.last
            if stage == self._frontend:
                self._metrics.of(m.TIME_TO_FIRST_TEXT, trace.requested).observe(timing.first)

    def emitted(self, trace: RequestTrace | None, stage: str, chunk: OutputChunk) -> None:
        if trace is None:
            return
        for part, seconds in chunk.seconds.items():
            self._metrics.of(m.STAGE_PARTS, stage, part).observe(seconds)
        if isinstance(chunk, ProgressChunk):
            steps = chunk.done - trace.steps.get(chunk.stage, 0)
            trace.steps[chunk.stage] = chunk.done
            if steps > 0:  # negative: another replica has restarted the stage's work
                self._metrics.of(m.STAGE_STEPS, chunk.stage).inc(steps)
        elif (modality := self._modalities.get(chunk.modality)) is not None:
            output = trace.outputs.get(chunk.modality)
            if output is None:
                output = trace.outputs[chunk.modality] = OutputTrace(stage, trace.streamed)
            modality.observe(self._metrics, output, chunk, self._clock() - trace.started)

    def failed(self, trace: RequestTrace | None, stage: str, error: Exception) -> None:
        if trace is not None:
            self.refused(error, stage)
            self.ended(trace, "failed")

    def refused(self, error: BaseException, stage: str = "") -> None:
        """Count an error, including errors of requests that were refused before they were opened."""
        self._metrics.of(m.ERRORS, type(error).__name__, stage).inc()

    def ended(self, trace: RequestTrace | None, outcome: Outcome) -> None:
        if trace is None:
            return
        trace.outcome = outcome
        self._metrics.of(m.REQUESTS, outcome, trace.requested).inc()
        for stage, timing in trace.stages.items():
            if timing.last is not None:
                self._metrics.of(m.STAGE_REQUEST_DURATION, stage).observe(timing.last - timing.sent)
        if self._spans:
            self._emit_spans(trace)

    def _emit_spans(self, trace: RequestTrace) -> None:
        """Emit a span for each stage except the frontend, for which vLLM emits the span `llm_request`."""
        context = extract_trace_context(trace.trace_headers)
        for stage, timing in trace.stages.items():
            if stage != self._frontend and timing.last is not None:
                instrument_manual(
                    span_name=f"omni_{stage}",
                    start_time=int((trace.arrival + timing.sent) * NS),
                    end_time=int((trace.arrival + timing.last) * NS),
                    attributes=_attributes(trace, stage, timing),
                    context=context,
                    kind=SpanKind.INTERNAL,
                )

    def waiting(self, stage: str, requests: int) -> None:
        self._metrics.of(m.REQUESTS_WAITING, stage).set(requests)

    def taken_over(self, stage: str) -> None:
        self._metrics.of(m.REQUEST_FAILOVERS, stage).inc()

    def fetched(self, source: str, target: str, seconds: float) -> None:
        self._metrics.of(m.KV_WAIT, source, target).observe(seconds)

    def local_prefill(self, stage: str) -> None:
        self._metrics.of(m.KV_LOCAL_PREFILLS, stage).inc()


def _attributes(trace: RequestTrace, stage: str, timing: StageTiming) -> dict[str, str | int | float]:
    facts: dict[str, str | int | float] = {
        SpanAttributes.GEN_AI_REQUEST_ID: trace.request_id,
        SpanAttributes.GEN_AI_USAGE_COMPLETION_TOKENS: timing.tokens,
        "omni.stage": stage,
        "omni.replica": str(timing.replica),
        "omni.outcome": trace.outcome or "",
    }
    if timing.waited is not None:
        facts[SpanAttributes.GEN_AI_LATENCY_TIME_IN_QUEUE] = timing.waited
    if timing.first is not None:
        facts[SpanAttributes.GEN_AI_LATENCY_TIME_TO_FIRST_TOKEN] = timing.first - timing.sent
    for modality, output in trace.outputs.items():
        if output.stage == stage:
            facts |= {f"omni.{modality}_{name}": fact for name, fact in output.facts.items()}
    return facts


def payload_bytes(payload: Any) -> int:
    """Return the size in bytes of a message between stages: 4 for each integer, 0 for bool and str, else all bytes.

    Args:
        payload: a message of a plugin (`msgspec.Struct`), a list of token ids, or a value inside one of these.
    """
    match payload:
        case bool() | str() | None:
            return 0
        case int():
            return ID_BYTES
        case bytes():
            return len(payload)
        case [int(), *_]:
            return ID_BYTES * len(payload)
        case [*items]:
            return sum(map(payload_bytes, items))
        case dict():
            return sum(map(payload_bytes, payload.values()))
        case msgspec.Struct():
            return sum(payload_bytes(getattr(payload, name)) for name in payload.__struct_fields__)
    return int(getattr(payload, "nbytes", 0))
