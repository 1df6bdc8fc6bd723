"""The course of one request, as data. All times are seconds since its arrival unless said otherwise. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_omni_ext.ids import ReplicaId

_US = 1_000_000


@dataclass(slots=True)
class StageCourse:
    """One request in one stage.

    Attributes:
        sent: when the stage was given the request.
        waited: how long its engine queued it before it was first scheduled; None until known.
        first, last: its first and its latest output.
        tokens: tokens (for a codec stage: frames, and the end mark) it made.
    """

    replica: ReplicaId
    sent: float
    waited: float | None = None
    first: float | None = None
    last: float | None = None
    tokens: int = 0


@dataclass(slots=True)
class HandOver:
    """What went over one edge. `size` in bytes; a token id counts 4."""

    first: float
    last: float = 0.0
    chunks: int = 0
    size: int = 0


@dataclass(slots=True)
class Heard:
    """The sound of one request: when each piece came, and what they are together.

    Attributes:
        dry: seconds without sound for somebody who plays each piece as soon as it is there.
    """

    stage: str
    sample_rate: int
    pieces: list[float] = field(default_factory=list)
    frames: int = 0
    samples: int = 0
    dry: float = 0.0

    def add(self, time: float, samples: int) -> float:
        """Take a piece; return for how long there was nothing left to play before it, in seconds."""
        gap = max(0.0, time - (self.pieces[0] + self.seconds + self.dry)) if self.pieces else 0.0
        self.pieces.append(time)
        self.samples += samples
        self.dry += gap
        return gap

    @property
    def seconds(self) -> float:
        """Playing time."""
        return self.samples / self.sample_rate


@dataclass(slots=True)
class Record:
    """Everything noted about one request.

    Attributes:
        request_id: the client's.
        started: monotonic clock at arrival, seconds.
        arrival: Unix time at arrival, seconds.
        open_parts: what has to end before the request has.
        outcome: finished, failed or aborted; None while it runs.
    """

    request_id: str
    modalities: tuple[str, ...]
    started: float
    arrival: float
    trace_headers: Mapping[str, str] | None
    open_parts: set[str]
    stages: dict[str, StageCourse] = field(default_factory=dict)
    handovers: dict[tuple[str, str], HandOver] = field(default_factory=dict)
    heard: Heard | None = None
    ended: float | None = None
    outcome: str | None = None

    @property
    def asked(self) -> str:
        """The modalities as one label."""
        return "+".join(self.modalities)


def as_metrics(record: Record) -> dict[str, Any]:
    """The `metrics` object of a response."""
    metrics: dict[str, Any] = {
        "request_id": record.request_id,
        "arrival_unix_s": record.arrival,
        "stages": {stage: _stage(course) for stage, course in record.stages.items()},
        "handovers": [
            {"from": source, "to": target, "chunks": over.chunks, "bytes": over.size, **_span(over.first, over.last)}
            for (source, target), over in record.handovers.items()
        ],
    }
    if record.heard is not None:
        metrics["audio"] = _audio(record.heard)
    return metrics


def _stage(course: StageCourse) -> dict[str, Any]:
    return {
        "replica": str(course.replica),
        "queued_s": _round(course.sent),
        "waited_s": _round(course.waited),
        "first_output_s": _round(course.first),
        "last_output_s": _round(course.last),
        "tokens": course.tokens,
    }


def _audio(heard: Heard) -> dict[str, Any]:
    times = _span(heard.pieces[0], heard.pieces[-1]) if heard.pieces else {}
    return {
        "stage": heard.stage,
        "frames": heard.frames,
        "samples": heard.samples,
        "seconds": _round(heard.seconds),
        "chunks": len(heard.pieces),
        "underrun_s": _round(heard.dry),
        **times,
    }


def _span(first: float, last: float) -> dict[str, Any]:
    return {"first_s": _round(first), "last_s": _round(last)}


def _round(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


# -- trace file -------------------------------------------------------------------------------------------------


def as_trace(record: Record) -> dict[str, Any]:
    """The request in the Trace Event Format, which Perfetto and chrome://tracing open: one row for each stage."""
    events: list[dict[str, Any]] = [_named("process_name", 0, f"request {record.request_id}")]
    rows = {stage: row for row, stage in enumerate(record.stages, start=1)}
    for stage, course in record.stages.items():
        events += [_named("thread_name", rows[stage], f"{stage} ({course.replica})"), *_bars(rows[stage], course)]
    for (source, target), over in record.handovers.items():
        facts = {"chunks": over.chunks, "bytes": over.size}
        events.append(_bar(f"{source} to {target}", rows[target], over.first, over.last, facts))
    if record.heard is not None:
        row = len(rows) + 1
        events.append(_named("thread_name", row, "sound to the client"))
        events += [_point("sound", row, time) for time in record.heard.pieces]
    if record.outcome is not None and record.ended is not None:
        events.append(_bar(f"request: {record.outcome}", 0, 0.0, record.ended, {"modalities": record.asked}))
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": as_metrics(record)}


def _bars(row: int, course: StageCourse) -> list[dict[str, Any]]:
    if course.first is None or course.last is None:
        return [_point("sent, no output", row, course.sent)]
    return [
        _bar("to first output", row, course.sent, course.first, {"waited_s": course.waited}),
        _bar("output", row, course.first, course.last, {"tokens": course.tokens}),
    ]


def _bar(name: str, row: int, first: float, last: float, facts: dict[str, Any]) -> dict[str, Any]:
    at, end = round(first * _US), round(last * _US)
    return {"name": name, "ph": "X", "pid": 1, "tid": row, "ts": at, "dur": end - at, "args": facts}


def _point(name: str, row: int, time: float) -> dict[str, Any]:
    return {"name": name, "ph": "i", "s": "t", "pid": 1, "tid": row, "ts": round(time * _US)}


def _named(kind: str, row: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": 1, "tid": row, "args": {"name": name}}
