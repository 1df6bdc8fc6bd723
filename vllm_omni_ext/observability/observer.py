"""Records events of requests and replicas. The orchestrator calls it; it makes no decisions."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import msgspec
from prometheus_client import CollectorRegistry
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, FinishReason
from vllm.v1.metrics.stats import SchedulerStats

from vllm_omni_ext import metrics as m
from vllm_omni_ext.errors import RequestFailed
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.metrics import Metrics
from vllm_omni_ext.modalities.base import TEXT, Modality, OutputChunk, ProgressChunk
from vllm_omni_ext.modalities.registry import CORE
from vllm_omni_ext.observability.request_trace import HandOver, OutputTrace, RequestTrace, StageTiming
from vllm_omni_ext.observability.shown_states import ShownStates
from vllm_omni_ext.pool.stage_pool import Why

GONE_WITH_REPLICA = (
    m.REPLICA_UP,
    m.REPLICA_RUNNING,
    m.REPLICA_WAITING,
    m.REPLICA_IN_FLIGHT,
    m.REPLICA_HEARTBEAT,
)
"""Metrics of a replica that exist as long as its name is known. Its totals stay: sums over replicas never go back."""

ID_BYTES = 4
"""Bytes that one token or codec id counts in transfers between stages."""

KV_FAILURE_COLUMNS = {"send": "num_failed_transfers", "receive": "num_failed_recvs", "expired": "num_kv_expired_reqs"}
"""Kinds of failures in `KV_FAILURES`, and the names of vLLM's connector counters for them."""

Load = tuple[int, int]
"""Running and waiting requests of a replica."""


class Observer:
    """One per API server.

    Args:
        metrics: the metrics to write.
        frontend: name of the stage whose tokens are vLLM's text output.
        replicas: all replicas; they must be up.
        modalities: modalities of output chunks, by name.
        keep: number of request traces kept for `trace`.
        alone: no other API server sets the same gauges.
        ended: called with every record when its request has ended.
        clock: monotonic clock, seconds.
    """

    def __init__(
        self,
        metrics: Metrics,
        *,
        frontend: str,
        replicas: Iterable[ReplicaId],
        modalities: Mapping[str, Modality] = CORE,
        keep: int = 0,
        alone: bool = True,
        ended: Callable[[RequestTrace], None] = lambda record: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics = metrics
        self._frontend = frontend
        self._modalities = modalities
        self._keep = keep
        self._shown = ShownStates(alone=alone, clock=clock)
        self._ended = ended
        self._clock = clock
        self._quiet: Callable[[], None] = lambda: None
        self._records: dict[str, RequestTrace] = {}
        self._kept: dict[str, RequestTrace | None] = {}
        self.loads: dict[ReplicaId, Load] = {}
        self._load: dict[ReplicaId, tuple[Any, Any]] = {}
        self._in_flight: dict[ReplicaId, Any] = {}
        self._restarts: dict[ReplicaId, int] = {}
        for replica in replicas:
            self.replica_up(replica)
            self.waiting(replica.stage, 0)  # makes the metric exist before a request waits

    @classmethod
    def unseen(cls, frontend: str, replicas: Iterable[ReplicaId]) -> Observer:
        """An observer whose metrics are not exported."""
        return cls(Metrics("", CollectorRegistry()), frontend=frontend, replicas=replicas)

    def watch_quiet(self, quiet: Callable[[], None]) -> None:
        """Call `quiet` when no request is in flight; at once if none is now."""
        self._quiet = quiet
        if not self._records:
            quiet()

    def held(self) -> int:
        """Number of requests that have not ended."""
        return len(self._records)

    # -- replicas -----------------------------------------------------------------------------------------------

    def replica_up(self, replica: ReplicaId) -> None:
        """Record that a replica takes requests."""
        labels = (replica.stage, str(replica))
        self._metrics.of(m.REPLICA_UP, *labels).set(1)
        running, waiting = self._metrics.of(m.REPLICA_RUNNING, *labels), self._metrics.of(m.REPLICA_WAITING, *labels)
        self._load[replica] = (running, waiting)
        self._in_flight[replica] = self._metrics.of(m.REPLICA_IN_FLIGHT, *labels)
        self.loaded(replica, SchedulerStats())

    def replica_down(self, replica: ReplicaId) -> None:
        """Record that a replica is lost."""
        self._metrics.of(m.REPLICA_UP, replica.stage, str(replica)).set(0)
        self.loaded(replica, SchedulerStats())
        self.bound(replica, 0)

    def continue_restarts(self) -> None:
        """Continue the counts of restarts of the API server that this one replaces."""
        counts = self._metrics.shared_counts(m.REPLICA_RESTARTS)
        self._restarts = {ReplicaId.parse(replica): int(count) for (_, replica), count in counts.items()}

    def restarted(self, replica: ReplicaId, total: int) -> None:
        """Raise the count of a replica's restarts to `total`; it never falls. Exactly one API server counts them,
        because counters of several are summed.
        """
        counted = self._restarts.get(replica, 0)
        self._restarts[replica] = max(counted, total)
        self._metrics.of(m.REPLICA_RESTARTS, replica.stage, str(replica)).inc(self._restarts[replica] - counted)

    def heartbeat(self, replica: ReplicaId) -> None:
        """Record a heartbeat of a replica."""
        self._metrics.of(m.REPLICA_HEARTBEAT, replica.stage, str(replica)).set(time.time())

    def viewed(self, age_s: float) -> None:
        """Record that the coordinator's latest view is `age_s` seconds old."""
        self._metrics.of(m.COORDINATOR_VIEW).set(time.time() - age_s)

    def decided(self, replica: ReplicaId, why: Why) -> None:
        """Count a routing decision."""
        self._metrics.of(m.ROUTING_DECISIONS, replica.stage, str(replica), why).inc()

    def waiting(self, stage: str, requests: int) -> None:
        """Record how many requests wait for a replica of a stage."""
        self._metrics.of(m.REQUESTS_WAITING, stage).set(requests)

    def taken_over(self, stage: str) -> None:
        """Count a failover: a request continues although its replica of a stage is lost."""
        self._metrics.of(m.REQUEST_FAILOVERS, stage).inc()

    def forgotten(self, replica: ReplicaId) -> None:
        """A replica's name is free: its present state is removed, or overwritten where several processes share it."""
        labels = (replica.stage, str(replica))
        if replica in self._load:
            self.replica_down(replica)
        self._metrics.of(m.REPLICA_HEARTBEAT, *labels).set(math.nan)
        for metric in GONE_WITH_REPLICA:
            self._metrics.remove(metric, *labels)
        self._shown.forget(replica)
        for table in (self.loads, self._load, self._in_flight):
            table.pop(replica, None)  # type: ignore[attr-defined]

    def loaded(self, replica: ReplicaId, stats: SchedulerStats) -> None:
        """Record the statistics of a replica's scheduler after a step; `step_counter` is its time (`ReplicaAgent`)."""
        load = stats.num_running_reqs, stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
        self.loads[replica] = load
        if self._shown.due(replica, load, busy=load[0] > 0):
            running, waiting = self._load[replica]
            with m.StepGauge.state_after(stats.step_counter):
                running.set(load[0])
                waiting.set(load[1])
        if stats.kv_connector_stats:
            self._transferred(replica, stats.kv_connector_stats)

    def _transferred(self, replica: ReplicaId, columns: Mapping[str, Any]) -> None:
        """Record a connector's counters since the last call: lists with an entry per transfer or failure."""
        labels = (replica.stage, str(replica))
        self._metrics.of(m.KV_BYTES, *labels).inc(sum(columns.get("bytes_transferred", ())))
        for seconds in columns.get("transfer_duration", ()):
            self._metrics.of(m.KV_TRANSFER, replica.stage).observe(seconds)
        for kind, column in KV_FAILURE_COLUMNS.items():
            if failures := len(columns.get(column, ())):
                self._metrics.of(m.KV_FAILURES, *labels, kind).inc(failures)

    def bound(self, replica: ReplicaId, requests: int) -> None:
        """Record how many requests of this API server are open in a replica."""
        self._in_flight[replica].set(requests)

    # -- requests -----------------------------------------------------------------------------------------------

    def keep(self, request_id: str) -> None:
        """Keep the trace of this request (the client's id), replacing the oldest one."""
        while len(self._kept) >= max(1, self._keep):
            del self._kept[next(iter(self._kept))]
        self._kept[request_id] = None

    def trace(self, request_id: str) -> RequestTrace | None:
        """The trace of a request passed to `keep`; with several answers (`n`), that of the one opened last."""
        return self._kept.get(request_id)

    def opened(
        self,
        request_id: str,
        external_id: str,
        modalities: tuple[str, ...],
        *,
        parts: Iterable[str],
        arrival: float,
        trace_headers: Mapping[str, str] | None = None,
    ) -> None:
        """Record that a request arrived.

        Args:
            parts: names of its outputs; the request ends when all have ended.
            arrival: Unix time, seconds.
        """
        record = RequestTrace(
            request_id=external_id,
            modalities=modalities,
            started=self._clock() - max(0.0, time.time() - arrival),
            arrival=arrival,
            trace_headers=trace_headers,
            open_parts=set(parts),
        )
        self._records[request_id] = record
        if external_id in self._kept:
            self._kept[external_id] = record

    def sent(self, request_id: str, source: str | None, replica: ReplicaId, payload: Any = None) -> None:
        """Record that a stage was sent the request, or a chunk of it, by stage `source`; None: by the client."""
        record = self._records.get(request_id)
        if record is None:
            return
        now, target = self._clock() - record.started, replica.stage
        if target not in record.stages:
            record.stages[target] = StageTiming(replica, sent=now)
        if source is None:
            return
        edge, size = (source, target), payload_bytes(payload)
        over = record.handovers.get(edge)
        if over is None:
            over = record.handovers[edge] = HandOver(first=now)
        over.last, over.chunks, over.size = now, over.chunks + 1, over.size + size
        self._metrics.of(m.STAGE_TRANSFER_CHUNKS, source, target).inc()
        self._metrics.of(m.STAGE_TRANSFER_BYTES, source, target).inc(size)

    def produced(self, stage: str, output: EngineCoreOutput) -> None:
        """Record an output of a stage."""
        record = self._records.get(output.request_id)
        timing = None if record is None else record.stages.get(stage)
        if record is None or timing is None:
            return
        timing.last = self._clock() - record.started
        timing.tokens += len(output.new_token_ids)
        if output.events:
            self._scheduled(stage, timing, output.events)
        if timing.first is None:
            timing.first = timing.last
            if stage == self._frontend:
                self._metrics.of(m.TIME_TO_FIRST_TEXT, record.asked).observe(timing.first)
        if stage == self._frontend and output.finish_reason is not None:
            self._text_ended(output.request_id, output.finish_reason)

    def _text_ended(self, request_id: str, reason: FinishReason) -> None:
        match reason:
            case FinishReason.ABORT:
                self.aborted(request_id)
            case FinishReason.ERROR:
                self.failed(request_id, self._frontend, RequestFailed("the engine ended the request"))
            case _:
                self.finished(request_id, TEXT)

    def _scheduled(self, stage: str, timing: StageTiming, events: Iterable[Any]) -> None:
        times = {event.type: event.timestamp for event in events}
        queued, scheduled = times.get(EngineCoreEventType.QUEUED), times.get(EngineCoreEventType.SCHEDULED)
        if queued is not None and scheduled is not None and timing.waited is None:
            timing.waited = scheduled - queued
            self._metrics.of(m.STAGE_QUEUE, stage).observe(timing.waited)

    def fetched(self, source: str, target: str, seconds: float) -> None:
        """Record that a stage has received a KV cache of another one, `seconds` after it was announced."""
        self._metrics.of(m.KV_WAIT, source, target).observe(seconds)

    def alone(self, stage: str) -> None:
        """Count a request that the decode stage prefills itself."""
        self._metrics.of(m.KV_LOCAL_PREFILLS, stage).inc()

    def emitted(self, request_id: str, stage: str, chunk: OutputChunk) -> None:
        """Record a chunk of an output that goes to the client."""
        record = self._records.get(request_id)
        if record is None:
            return
        for part, seconds in chunk.seconds.items():
            self._metrics.of(m.STAGE_PARTS, stage, part).observe(seconds)
        if isinstance(chunk, ProgressChunk):
            self._stepped(record, chunk)
        elif (modality := self._modalities.get(chunk.modality)) is not None:
            trace = record.outputs.get(chunk.modality)
            if trace is None:
                trace = record.outputs[chunk.modality] = OutputTrace(stage)
            modality.observe(self._metrics, trace, chunk, self._clock() - record.started)

    def _stepped(self, record: RequestTrace, chunk: ProgressChunk) -> None:
        steps = chunk.done - record.steps.get(chunk.stage, 0)
        record.steps[chunk.stage] = chunk.done
        if steps > 0:  # fewer than before: the stage was lost, and starts over
            self._metrics.of(m.STAGE_STEPS, chunk.stage).inc(steps)

    # -- the end ------------------------------------------------------------------------------------------------

    def finished(self, request_id: str, part: str) -> None:
        """Record that an output is complete; the last one ends the request."""
        record = self._records.get(request_id)
        if record is not None:
            record.open_parts.discard(part)
            if not record.open_parts:
                self._end(request_id, "finished")

    def aborted(self, request_id: str) -> None:
        """Record that the client has disconnected; no-op for a request that has ended."""
        if request_id in self._records:
            self._end(request_id, "aborted")

    def failed(self, request_id: str, stage: str, error: BaseException) -> None:
        """Record that the request ended with an error; a cancellation counts as an abort."""
        if not isinstance(error, Exception):
            self.aborted(request_id)
        elif request_id in self._records:
            self.refused(error, stage)
            self._end(request_id, "failed")

    def refused(self, error: BaseException, stage: str = "") -> None:
        """Count an error, also one of a request that was never opened."""
        self._metrics.of(m.ERRORS, type(error).__name__, stage).inc()

    def _end(self, request_id: str, outcome: Literal["finished", "aborted", "failed"]) -> None:
        record = self._records.pop(request_id)
        record.outcome, record.ended = outcome, self._clock() - record.started
        self._metrics.of(m.REQUESTS, outcome, record.asked).inc()
        for stage, timing in record.stages.items():
            if timing.last is not None:
                self._metrics.of(m.STAGE_REQUEST_DURATION, stage).observe(timing.last - timing.sent)
        self._ended(record)
        if not self._records:
            self._quiet()


def payload_bytes(payload: Any) -> int:
    """Size of a stage transfer in bytes: tensors and bytes as they are, 4 bytes per id, nothing for flags and names."""
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
