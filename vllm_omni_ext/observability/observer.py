"""Notes what happens to requests and replicas. The orchestrator calls it at events; it decides nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, get_args

from prometheus_client import CollectorRegistry
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, FinishReason
from vllm.v1.metrics.stats import SchedulerStats

from vllm_omni_ext import metrics as m
from vllm_omni_ext.errors import RequestFailed
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.metrics import Metrics
from vllm_omni_ext.observability.record import HandOver, Heard, Record, StageCourse
from vllm_omni_ext.outputs import AudioOutput
from vllm_omni_ext.pool.stage_pool import Why

OF_REPLICA = (
    m.REPLICA_UP,
    m.REPLICA_RUNNING,
    m.REPLICA_WAITING,
    m.REPLICA_IN_FLIGHT,
    m.REPLICA_RESTARTS,
    m.REPLICA_HEARTBEAT,
    m.KV_BYTES,
)
"""Metrics that a replica has for as long as its name is known."""

TEXT, REST = "text", "rest"
"""Parts of a request that end on their own: the text, and everything that is made from it."""

ID_BYTES = 4
"""What one token or codec id counts in hand-overs."""

KV_FAILURE_COLUMNS = {"send": "num_failed_transfers", "receive": "num_failed_recvs", "expired": "num_kv_expired_reqs"}
"""Kinds of failures in `KV_FAILURES`, and where vLLM's connectors count them."""

Load = tuple[int, int]
"""Running and waiting requests of a replica."""


class Observer:
    """One per API server.

    Args:
        metrics: where to write.
        text_stage: name of the stage that answers text.
        replicas: all replicas, which are up.
        keep: how many courses of requests are kept for `course`.
        ended: told every record when its request has ended.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        metrics: Metrics,
        *,
        text_stage: str,
        replicas: Iterable[ReplicaId],
        keep: int = 0,
        ended: Callable[[Record], None] = lambda record: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics = metrics
        self._text_stage = text_stage
        self._keep = keep
        self._ended = ended
        self._clock = clock
        self._quiet: Callable[[], None] = lambda: None
        self._records: dict[str, Record] = {}
        self._kept: dict[str, Record | None] = {}
        self.loads: dict[ReplicaId, Load] = {}
        self._load: dict[ReplicaId, tuple[Any, Any]] = {}
        self._in_flight: dict[ReplicaId, Any] = {}
        self._gap = metrics.of(m.AUDIO_CHUNK_GAP)
        self._underrun = metrics.of(m.AUDIO_UNDERRUN)
        self._audio_seconds = metrics.of(m.AUDIO_SECONDS)
        for replica in replicas:
            self.replica_up(replica)
            self.waiting(replica.stage, 0)  # so that the figure is there before somebody waits

    @classmethod
    def unseen(cls, text_stage: str, replicas: Iterable[ReplicaId]) -> Observer:
        """One that writes where nobody looks."""
        return cls(Metrics("", CollectorRegistry()), text_stage=text_stage, replicas=replicas)

    def watch_quiet(self, quiet: Callable[[], None]) -> None:
        """Call `quiet` when no request is in flight, at once if that is so already."""
        self._quiet = quiet
        if not self._records:
            quiet()

    def held(self) -> int:
        """Requests that have not ended."""
        return len(self._records)

    # -- replicas -----------------------------------------------------------------------------------------------

    def replica_up(self, replica: ReplicaId) -> None:
        """A replica takes requests."""
        labels = (replica.stage, str(replica))
        self._metrics.of(m.REPLICA_UP, *labels).set(1)
        running, waiting = self._metrics.of(m.REPLICA_RUNNING, *labels), self._metrics.of(m.REPLICA_WAITING, *labels)
        self._load[replica] = (running, waiting)
        self._in_flight[replica] = self._metrics.of(m.REPLICA_IN_FLIGHT, *labels)
        self.loaded(replica, SchedulerStats())

    def replica_down(self, replica: ReplicaId) -> None:
        """A replica is gone."""
        self._metrics.of(m.REPLICA_UP, replica.stage, str(replica)).set(0)
        self.loaded(replica, SchedulerStats())
        self.bound(replica, 0)

    def restarted(self, replica: ReplicaId, times: int) -> None:
        """A replica is there, and so often it was started again."""
        self._metrics.of(m.REPLICA_RESTARTS, replica.stage, str(replica)).set(times)

    def heartbeat(self, replica: ReplicaId) -> None:
        """A replica was heard of."""
        self._metrics.of(m.REPLICA_HEARTBEAT, replica.stage, str(replica)).set(time.time())

    def viewed(self, age_s: float) -> None:
        """The coordinator was last heard of so many seconds ago."""
        self._metrics.of(m.COORDINATOR_VIEW).set(time.time() - age_s)

    def decided(self, replica: ReplicaId, why: Why) -> None:
        """A request was given to a replica."""
        self._metrics.of(m.BALANCING, replica.stage, str(replica), why).inc()

    def waiting(self, stage: str, requests: int) -> None:
        """So many requests wait for a replica of a stage."""
        self._metrics.of(m.REQUESTS_WAITING, stage).set(requests)

    def taken_over(self, stage: str) -> None:
        """A request goes on although its replica of a stage is gone."""
        self._metrics.of(m.TAKEN_OVER, stage).inc()

    def forgotten(self, replica: ReplicaId) -> None:
        """A replica's name is free: what bears it in the metrics is removed."""
        labels = (replica.stage, str(replica))
        for metric in OF_REPLICA:
            self._metrics.remove(metric, *labels)
        for why in get_args(Why):
            self._metrics.remove(m.BALANCING, *labels, why)
        for kind in KV_FAILURE_COLUMNS:
            self._metrics.remove(m.KV_FAILURES, *labels, kind)
        for table in (self.loads, self._load, self._in_flight):
            table.pop(replica, None)  # type: ignore[attr-defined]

    def loaded(self, replica: ReplicaId, stats: SchedulerStats) -> None:
        """A replica's scheduler said what it has."""
        load = stats.num_running_reqs, stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
        self.loads[replica] = load
        running, waiting = self._load[replica]
        running.set(load[0])
        waiting.set(load[1])
        if stats.kv_connector_stats:
            self._transferred(replica, stats.kv_connector_stats)

    def _transferred(self, replica: ReplicaId, columns: Mapping[str, Any]) -> None:
        """What a connector has counted since it last did, as lists with an entry for each transfer or failure."""
        labels = (replica.stage, str(replica))
        self._metrics.of(m.KV_BYTES, *labels).inc(sum(columns.get("bytes_transferred", ())))
        for seconds in columns.get("transfer_duration", ()):
            self._metrics.of(m.KV_TRANSFER, replica.stage).observe(seconds)
        for kind, column in KV_FAILURE_COLUMNS.items():
            if failures := len(columns.get(column, ())):
                self._metrics.of(m.KV_FAILURES, *labels, kind).inc(failures)

    def bound(self, replica: ReplicaId, requests: int) -> None:
        """So many requests of this API server are open in a replica."""
        self._in_flight[replica].set(requests)

    # -- requests -----------------------------------------------------------------------------------------------

    def keep(self, request_id: str) -> None:
        """Keep the course of this request (the client's id), in the place of the oldest one."""
        while len(self._kept) >= max(1, self._keep):
            del self._kept[next(iter(self._kept))]
        self._kept[request_id] = None

    def course(self, request_id: str) -> Record | None:
        """The course of a request that was to be kept; with several answers (`n`), of the one opened last."""
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
        """A request arrived, at Unix time `arrival`; it has ended when all its parts have."""
        record = Record(
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
        """A stage was given the request, or a chunk of it, by stage `source`; None: by the client."""
        record = self._records.get(request_id)
        if record is None:
            return
        now, target = self._clock() - record.started, replica.stage
        record.stages.setdefault(target, StageCourse(replica, sent=now))
        if source is None:
            return
        size = payload_bytes(payload)
        over = record.handovers.setdefault((source, target), HandOver(first=now))
        over.last, over.chunks, over.size = now, over.chunks + 1, over.size + size
        self._metrics.of(m.HANDOVER_CHUNKS, source, target).inc()
        self._metrics.of(m.HANDOVER_BYTES, source, target).inc(size)

    def produced(self, stage: str, output: EngineCoreOutput) -> None:
        """A stage gave an output."""
        record = self._records.get(output.request_id)
        course = None if record is None else record.stages.get(stage)
        if record is None or course is None:
            return
        course.last = self._clock() - record.started
        course.tokens += len(output.new_token_ids)
        if output.events:
            self._scheduled(stage, course, output.events)
        if course.first is None:
            course.first = course.last
            if stage == self._text_stage:
                self._metrics.of(m.TIME_TO_FIRST_TEXT, record.asked).observe(course.first)
        if stage == self._text_stage and output.finish_reason is not None:
            self._text_ended(output.request_id, output.finish_reason)

    def _text_ended(self, request_id: str, reason: FinishReason) -> None:
        match reason:
            case FinishReason.ABORT:
                self.aborted(request_id)
            case FinishReason.ERROR:
                self.failed(request_id, self._text_stage, RequestFailed("the engine ended the request"))
            case _:
                self.finished(request_id, TEXT)

    def _scheduled(self, stage: str, course: StageCourse, events: Iterable[Any]) -> None:
        times = {event.type: event.timestamp for event in events}
        queued, scheduled = times.get(EngineCoreEventType.QUEUED), times.get(EngineCoreEventType.SCHEDULED)
        if queued is not None and scheduled is not None and course.waited is None:
            course.waited = scheduled - queued
            self._metrics.of(m.STAGE_QUEUE, stage).observe(course.waited)

    def fetched(self, source: str, target: str, seconds: float) -> None:
        """A stage has gone on with a KV cache of another one, so long after it was told where it is."""
        self._metrics.of(m.KV_WAIT, source, target).observe(seconds)

    def alone(self, stage: str) -> None:
        """A stage was given a request whose prompt another one would compute, if it could."""
        self._metrics.of(m.KV_ALONE, stage).inc()

    def emitted(self, request_id: str, stage: str, piece: AudioOutput) -> None:
        """A piece of sound goes to the client."""
        record = self._records.get(request_id)
        if record is None:
            return
        if record.heard is None:
            record.heard = Heard(stage, piece.sample_rate)
        heard, samples = record.heard, len(piece.samples)
        heard.frames = len(piece.frames)
        if samples:
            self._underrun.inc(heard.add(self._clock() - record.started, samples))
            self._audio_seconds.inc(samples / piece.sample_rate)
            self._timed(heard)
        if piece.finished and heard.samples:
            self._metrics.of(m.REAL_TIME_FACTOR).observe(heard.pieces[-1] / heard.seconds)

    def _timed(self, heard: Heard) -> None:
        match heard.pieces:
            case [only]:
                self._metrics.of(m.TIME_TO_FIRST_AUDIO).observe(only)
            case [*_, before, last]:
                self._gap.observe(last - before)

    # -- the end ------------------------------------------------------------------------------------------------

    def finished(self, request_id: str, part: str) -> None:
        """The text, or the rest, is complete; the last of both ends the request."""
        record = self._records.get(request_id)
        if record is not None:
            record.open_parts.discard(part)
            if not record.open_parts:
                self._end(request_id, "finished")

    def aborted(self, request_id: str) -> None:
        """Nobody waits for the request any more, or nobody did already."""
        if request_id in self._records:
            self._end(request_id, "aborted")

    def failed(self, request_id: str, stage: str, error: BaseException) -> None:
        """The request ended with an error; a cancellation counts as an abort."""
        if not isinstance(error, Exception):
            self.aborted(request_id)
        elif request_id in self._records:
            self.refused(error, stage)
            self._end(request_id, "failed")

    def refused(self, error: BaseException, stage: str = "") -> None:
        """Count an error, also of a request that was never opened."""
        self._metrics.of(m.ERRORS, type(error).__name__, stage).inc()

    def _end(self, request_id: str, outcome: Literal["finished", "aborted", "failed"]) -> None:
        record = self._records.pop(request_id)
        record.outcome, record.ended = outcome, self._clock() - record.started
        self._metrics.of(m.REQUESTS, outcome, record.asked).inc()
        for stage, course in record.stages.items():
            if course.last is not None:
                self._metrics.of(m.STAGE_TIME, stage).observe(course.last - course.sent)
        self._ended(record)
        if not self._records:
            self._quiet()


def payload_bytes(payload: Any) -> int:
    """Size of what is handed over: tensors and bytes as they are, 4 bytes an id, nothing for flags and names."""
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
    return int(getattr(payload, "nbytes", 0))
