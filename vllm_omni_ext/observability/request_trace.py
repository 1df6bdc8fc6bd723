"""Times and sizes of one request in each stage. Times are seconds since its arrival unless stated otherwise. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from vllm_omni_ext.ids import ReplicaId

Outcome = Literal["finished", "failed", "aborted"]


@dataclass(slots=True)
class StageTiming:
    """One request in one stage.

    Attributes:
        sent: when the stage was sent the request.
        waited: how long its engine queued the request before it was first scheduled; None until known.
        first, last: times of the first and the latest output.
        tokens: number of generated tokens (for a codec stage: frames, and the end mark).
    """

    replica: ReplicaId
    sent: float
    waited: float | None = None
    first: float | None = None
    last: float | None = None
    tokens: int = 0


@dataclass(slots=True)
class HandOver:
    """Data sent over one edge. `size` in bytes; a token id counts 4."""

    first: float
    last: float = 0.0
    chunks: int = 0
    size: int = 0


@dataclass(slots=True)
class OutputTrace:
    """One output of a request (e.g. its audio), as its modality records it.

    Attributes:
        stage: the stage that produced it.
        times: arrival times of its chunks.
        facts: values over all chunks, by name; for `metrics` of a response and for spans.
    """

    stage: str
    times: list[float] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class RequestTrace:
    """Everything recorded about one request.

    Attributes:
        request_id: the client's id.
        started: monotonic clock at arrival, seconds.
        arrival: Unix time at arrival, seconds.
        outputs: outputs with at least one chunk, by modality.
        steps: number of steps that each stage has reported as done.
        outcome: None while the request runs.
    """

    request_id: str
    modalities: tuple[str, ...]
    started: float
    arrival: float
    trace_headers: Mapping[str, str] | None
    stages: dict[str, StageTiming] = field(default_factory=dict)
    handovers: dict[tuple[str, str], HandOver] = field(default_factory=dict)
    outputs: dict[str, OutputTrace] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    outcome: Outcome | None = None

    @property
    def requested(self) -> str:
        """The requested modalities as one label."""
        return "+".join(self.modalities)


def as_metrics(record: RequestTrace) -> dict[str, Any]:
    """Return the `metrics` object of a response."""
    stages = {
        stage: {
            "replica": str(timing.replica),
            "queued_s": _round(timing.sent),
            "waited_s": _round(timing.waited),
            "first_output_s": _round(timing.first),
            "last_output_s": _round(timing.last),
            "tokens": timing.tokens,
        }
        for stage, timing in record.stages.items()
    }
    handovers = [
        {"from": source, "to": target, "chunks": over.chunks, "bytes": over.size, **_span(over.first, over.last)}
        for (source, target), over in record.handovers.items()
    ]
    about = {"request_id": record.request_id, "arrival_unix_s": record.arrival}
    outputs = {modality: _output(trace) for modality, trace in record.outputs.items()}
    return {**about, "stages": stages, "handovers": handovers, **outputs}


def _output(trace: OutputTrace) -> dict[str, Any]:
    times = _span(trace.times[0], trace.times[-1]) if trace.times else {}
    facts = {name: _round(fact) if isinstance(fact, float) else fact for name, fact in trace.facts.items()}
    return {"stage": trace.stage, **facts, "chunks": len(trace.times), **times}


def _span(first: float, last: float) -> dict[str, Any]:
    return {"first_s": _round(first), "last_s": _round(last)}


def _round(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
