"""Times and transfer sizes of one request in each stage.

Times are seconds since the request's arrival, unless a docstring states another unit or start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from vllm_omni_ext.ids import ReplicaId

Outcome = Literal["finished", "failed", "aborted"]


@dataclass(slots=True)
class StageTiming:
    """Times of one request in one stage.

    Attributes:
        sent: time at which the request was sent to the stage.
        waited: seconds in the engine's queue before the request was first scheduled; None: not reported yet.
        first, last: times of the first and the latest output; None before the first output.
        tokens: number of generated tokens (for a codec stage: frames, and the end mark).
        cached: number of prompt tokens that were in the stage's prefix cache; None: not reported yet.
    """

    replica: ReplicaId
    sent: float
    waited: float | None = None
    first: float | None = None
    last: float | None = None
    tokens: int = 0
    cached: int | None = None


@dataclass(slots=True)
class HandOver:
    """Data that one request has sent from one stage to another.

    Attributes:
        first, last: times of the first and the latest message.
        chunks: number of messages.
        size: bytes of all messages; a token id counts 4.
    """

    first: float
    last: float = 0.0
    chunks: int = 0
    size: int = 0


@dataclass(slots=True)
class OutputTrace:
    """Times and sums of one output of a request (e.g. its audio), recorded by its modality.

    Attributes:
        stage: the stage that produced the output.
        streamed: the client receives the output's chunks when they arrive.
        times: arrival times of the output's chunks.
        facts: sums over all chunks, by name, e.g. "samples"; for `metrics` of a response and for spans.
    """

    stage: str
    streamed: bool
    times: list[float] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class RequestTrace:
    """All recorded times and sizes of one request.

    Attributes:
        request_id: the id of the request at the client's API.
        started: monotonic clock at arrival, seconds.
        arrival: Unix time at arrival, seconds.
        trace_headers: the client's OpenTelemetry headers; None without.
        streamed: the client receives the answer in pieces, while it is made.
        stages: times in each stage to which the request was sent, by stage.
        handovers: data sent between stages, by (source stage, target stage).
        outputs: outputs with at least one chunk, by modality.
        steps: number of steps that each stage has reported as completed, by stage.
        outcome: how the request ended; None while it runs.
    """

    request_id: str
    modalities: tuple[str, ...]
    started: float
    arrival: float
    trace_headers: Mapping[str, str] | None
    streamed: bool = False
    stages: dict[str, StageTiming] = field(default_factory=dict)
    handovers: dict[tuple[str, str], HandOver] = field(default_factory=dict)
    outputs: dict[str, OutputTrace] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    outcome: Outcome | None = None

    @property
    def requested(self) -> str:
        """The requested modalities as one label value, e.g. "text+audio"."""
        return "+".join(self.modalities)


def as_metrics(record: RequestTrace) -> dict[str, Any]:
    """Return the `metrics` object of a response as JSON data.

    Its keys are `request_id`, `arrival_unix_s`, `stages` (times by stage), `handovers` (a list of transfers between
    stages), and the name of each modality of the answer.
    """
    stages = {
        stage: {
            "replica": str(timing.replica),
            "queued_s": _round(timing.sent),
            "waited_s": _round(timing.waited),
            "first_output_s": _round(timing.first),
            "last_output_s": _round(timing.last),
            "tokens": timing.tokens,
            "cached_tokens": timing.cached,
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
